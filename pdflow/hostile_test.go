// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
)

// What hostile clients and broken engines do.

// dial opens a raw connection to a gateway and sends text over it.
func dial(t *testing.T, url, text string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	_, err = io.WriteString(c, text)
	require.NoError(t, err)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(20*time.Second)))
	return c.(*net.TCPConn)
}

func raw(path, body string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		path, len(body), body)
}

func TestAClientThatClosesItsSendingSideGetsNoFalseResponse(t *testing.T) {
	x := script(t, &fake{}, gone, answer(ok))
	c := dial(t, x.url, raw("/v1/completions", completion("a", "")))
	require.NoError(t, c.CloseWrite())
	got, _ := io.ReadAll(c)
	require.Empty(t, string(got))
}

// net/http closes at once, with the body unread, if the client has asked for the connection's end. The reset that
// follows took the error response from the client.
func TestAClientThatAskedForTheEndSeesWhyItsBodyIsRefused(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithMaxBody(1000))
	nowhere := func(string) (*passthrough.Engines, *pdflow.Error) { return nil, nil }
	pass, err := passthrough.New(nowhere, &passthrough.Options{MaxBody: 1000})
	require.NoError(t, err)
	for path, url := range map[string]string{"/v1/completions": x.url, "/tokenize": serve(t, pass)} {
		t.Run(path, func(t *testing.T) {
			c := dial(t, url, "POST "+path+" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"+
				"Connection: close\r\nContent-Length: 3000\r\n\r\n")
			r := bufio.NewReader(c)
			resp, err := http.ReadResponse(r, nil)
			require.NoError(t, err)
			_, err = io.ReadAll(io.LimitReader(resp.Body, resp.ContentLength))
			require.NoError(t, err)
			require.Equal(t, 413, resp.StatusCode)
			for range 3 {
				time.Sleep(10 * time.Millisecond)
				_, err = io.WriteString(c, strings.Repeat("a", 1000))
				require.NoError(t, err, "the connection is closed while the client sends")
			}
			_, err = r.ReadByte()
			require.ErrorIs(t, err, io.EOF)
		})
	}
}

func TestAnUnfinishedBodyDoesNotHoldItsConnection(t *testing.T) {
	t.Parallel()
	limits := config.Timeouts{}
	limits.Body = 100 * time.Millisecond
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithTimeouts(limits))
	for name, c := range map[string]struct {
		head string
		want int
	}{
		"slow": {"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" +
			"Content-Length: 1000\r\n\r\n{", 408},
		"of a wrong type": {"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n" +
			"Content-Length: 1000\r\n\r\n{", 415},
		"for an unknown path": {"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{", 404},
	} {
		t.Run(name, func(t *testing.T) {
			conn := dial(t, x.url, c.head)
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			require.Equal(t, c.want, resp.StatusCode)
			_, err = io.Copy(io.Discard, conn)
			require.NoError(t, err, "the connection is still open")
		})
	}
}

func TestWhatWasReadOfAWholeResponseIsFlushedBeforeTheCut(t *testing.T) {
	x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Length", "500")
		_, _ = io.WriteString(w, `{"choices":[{"text":"begun`)
		_ = http.NewResponseController(w).Flush()
		time.Sleep(20 * time.Millisecond)
		panic(http.ErrAbortHandler)
	})
	r := post(t, x.url, "/v1/completions", completion("a", ""))
	require.Error(t, r.err)
	require.Equal(t, 200, r.status)
	require.Contains(t, r.body, "begun")
}

func TestAClientsTextIsNotRepeatedInErrors(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(ok))
	for _, name := range []string{"my secret prompt", strings.Repeat("k", 5000)} {
		r := post(t, x.url, "/v1/completions", `{"`+name+`":1,"`+name+`":2}`)
		require.Equal(t, 400, r.status)
		require.NotContains(t, r.body, name)
	}
	require.Contains(t, post(t, x.url, "/v1/completions", `{"max_tokens":1,"max_tokens":2}`).body, "max_tokens")
}

func TestARefusalOfPrefillWhoseBodyIsCutKeepsItsStatus(t *testing.T) {
	x := script(t, &fake{}, func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Length", "300")
		w.WriteHeader(400)
		_, _ = io.WriteString(w, `{"error":`)
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}, answer(ok), pdflow.WithRetry(config.Retry{MaxAttempts: 3}))
	require.Equal(t, 400, post(t, x.url, "/v1/completions", completion("a", "")).status)
	require.Equal(t, "P", x.all())
}

// A stream that an engine has not ended properly never looks whole to the client.
func TestStreamsThatEndWrongly(t *testing.T) {
	role := `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	token := `data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n"
	long := `data: {"choices":[],"usage":{"x":"` + strings.Repeat("u", 2048) + `"}}` + "\n\n"
	for name, c := range map[string]struct{ text, proto string }{
		"nothing but a role":                  {role, "chunked"},
		"an error without its empty line":     {`data: {"error":{"message":"x","code":500}}`, "chunked"},
		"the connection closed before [DONE]": {role + token, "close"},
		"an abort, and then a long usage": {role + token +
			`data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}` + "\n\n" + long + "data: [DONE]\n\n",
			"chunked"},
		"an error after the first token": {role + token + `data: {"error":{"message":"x","code":500}}` +
			"\n\ndata: [DONE]\n\n", "chunked"},
		"an error, spaced as Python does": {token + `data: {"error": {"message": "x", "code": 500}}` +
			"\n\ndata: [DONE]\n\n", "chunked"},
		"an error as the last event": {token + `data: {"error":{"message":"x","code":500}}` + "\n\n",
			"chunked"},
		"nothing but [DONE]": {"data: [DONE]\n\n", "chunked"},
		"a role and [DONE]":  {role + "data: [DONE]\n\n", "chunked"},
		"an error after a byte order mark": {"\ufeff" + `data: {"error":{"message":"x","code":500}}` + "\n\n",
			"chunked"},
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
				if c.proto == "chunked" {
					w.Header().Set("Content-Type", "Text/Event-Stream")
					_, _ = io.WriteString(w, c.text)
					return
				}
				conn, _, err := http.NewResponseController(w).Hijack()
				if err == nil {
					_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: "+
						"close\r\n\r\n"+c.text)
					_ = conn.Close()
				}
			})
			r := post(t, x.url, "/v1/chat/completions", `{"messages":[],"stream":true}`)
			require.True(t, r.err != nil || r.status >= 500, "%d %s", r.status, r.body)
		})
	}
}

// An error that comes after a token reaches the client. [DONE] does not, so that the client does not take the response
// for whole.
func TestAnErrorAmidAStreamIsAFailure(t *testing.T) {
	t.Parallel()
	token := `data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}` + "\n\n"
	fault := `data: {"error":{"message":"boom","code":500}}` + "\n\n"
	usage := `data: {"choices":[],"usage":{}}` + "\n\n"
	for name, pieces := range map[string][]string{
		"at once with the end":   {token, fault + "data: [DONE]\n\n"},
		"in a piece of its own":  {token, fault, usage, "data: [DONE]\n\n"},
		"cut amid its mark":      {token, fault[:9], fault[9:], "data: [DONE]\n\n"},
		"without [DONE]":         {token, fault},
		"with [DONE] cut in two": {token, fault + "data: [DO", "NE]\n\n"},
		"at once with its token": {token, token + fault, "data: [DONE]\n\n"},
		"after half an event":    {token, token[:30], token[30:] + fault, "data: [DONE]\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
				w.Header().Set("Content-Type", "text/event-stream")
				for _, p := range pieces {
					_, _ = io.WriteString(w, p)
					_ = http.NewResponseController(w).Flush()
					time.Sleep(20 * time.Millisecond)
				}
			})
			r := post(t, x.url, "/v1/completions", completion("a", `"stream":true`))
			require.Equal(t, 200, r.status)
			require.Error(t, r.err, r.body)
			require.Contains(t, r.body, "boom")
			require.NotContains(t, r.body, "[DONE]")
			require.Equal(t, pdflow.CodeStreamBroken, last(x).Err.Code)
		})
	}
}

// A response's text that looks like an error event is not taken for one.
func TestATextCannotFakeAnErrorEvent(t *testing.T) {
	text := `data: {"choices":[{"index":0,"text":"\ndata: {\"error\":{\"message\":\"x\"}}\n\n",` +
		`"finish_reason":"stop"}]}` + "\n\n"
	x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, text+text+"data: [DONE]\n\n")
	})
	r := post(t, x.url, "/v1/completions", completion("a", `"stream":true`))
	require.NoError(t, r.err)
	require.Equal(t, text+text+"data: [DONE]\n\n", r.body)
}

// A large event comes in thousands of reads. Searching all of it after each one would take minutes, and the CPU of
// other requests. A busy machine makes all sizes slow: then the time must grow as the size does, which is 8 times, and
// not as its square.
func TestALargeEventIsRewrittenInTime(t *testing.T) {
	t.Parallel()
	rewritten := func(size int) time.Duration {
		event := `data: {"choices":[{"index":0,"text":"` + strings.Repeat("a", size) + `"}]}` + "\n\n"
		x := script(t, &rewriting{}, answer(`{"first":"changed"}`),
			func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = io.WriteString(w, `data: {"choices":[{"index":0,"text":"b"}]}`+"\n\n"+event+"data: [DONE]\n\n")
			})
		began := time.Now()
		r := post(t, x.url, "/v1/completions", completion("a", `"logprobs":1,"stream":true`))
		require.NoError(t, r.err)
		require.Equal(t, 200, r.status)
		require.Greater(t, len(r.body), len(event))
		return time.Since(began)
	}
	var small, large time.Duration
	for range 4 { // others may use the machine during the large one only
		if small, large = rewritten(6<<20), rewritten(48<<20); large < max(10*time.Second, 24*small) {
			return
		}
	}
	require.Failf(t, "too slow", "6 MB took %v, 48 MB %v", small, large)
}
