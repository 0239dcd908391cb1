// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
)

// A stream that is cut must look cut to the client, whatever middleware stands around the flow. The clients here read
// the connection's bytes themselves, because a client library might hide the response's end.

const begun = `data: {"choices":[{"index":0,"text":"begun"}]}` + "\n\n"

// breaks is a decode engine that breaks the connection after the first bytes of its response.
func breaks(contentType, length, text string) handler {
	return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", contentType)
		if length != "" {
			w.Header().Set("Content-Length", length)
		}
		_, _ = io.WriteString(w, text)
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
}

// swallow recovers from every panic, http.ErrAbortHandler included, and then tries to answer 500.
func swallow(wrap func(http.ResponseWriter) http.ResponseWriter) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer func() {
				_ = http.NewResponseController(w).SetWriteDeadline(time.Time{}) // as a host's own deadlines would
				if recover() != nil {
					w.WriteHeader(http.StatusInternalServerError)
					_, _ = io.WriteString(w, "recovered")
				}
			}()
			next.ServeHTTP(wrap(w), r)
		})
	}
}

type unwrapping struct{ http.ResponseWriter }

func (u unwrapping) Unwrap() http.ResponseWriter { return u.ResponseWriter }

// opaque hides everything but the three methods of every ResponseWriter.
type opaque struct{ http.ResponseWriter }

// flushing is a writer that can flush, but gives no way to its connection.
type flushing struct{ http.ResponseWriter }

func (f flushing) Flush() { _ = http.NewResponseController(f.ResponseWriter).Flush() }

var (
	unwrapped = swallow(func(w http.ResponseWriter) http.ResponseWriter { return unwrapping{w} })
	hidden    = swallow(func(w http.ResponseWriter) http.ResponseWriter { return opaque{w} })
	flushed   = swallow(func(w http.ResponseWriter) http.ResponseWriter { return flushing{w} })
)

func plain(next http.Handler) http.Handler { return next }

// protocol starts a server of one protocol, with a client that says how the response to one request ended.
type protocol struct {
	name   string
	second bool // HTTP/2
	listen func(t *testing.T, h http.Handler) net.Conn
	ask    func(t *testing.T, c net.Conn, path, body string) (text string, whole bool)
}

func protocols() []protocol {
	open := func(secure, second bool) func(*testing.T, http.Handler) net.Conn {
		return func(t *testing.T, h http.Handler) net.Conn {
			t.Helper()
			s := httptest.NewUnstartedServer(h)
			s.Config.Protocols = new(http.Protocols)
			s.Config.Protocols.SetHTTP1(!second)
			s.Config.Protocols.SetHTTP2(second && secure)
			s.Config.Protocols.SetUnencryptedHTTP2(second && !secure)
			s.EnableHTTP2 = second
			s.Config.ErrorLog = log.New(io.Discard, "", 0) // it says that a middleware wrote two heads
			if secure {
				s.StartTLS()
			} else {
				s.Start()
			}
			t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
			c, err := net.Dial("tcp", s.Listener.Addr().String())
			require.NoError(t, err)
			t.Cleanup(func() { _ = c.Close() })
			require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
			if !secure {
				return c
			}
			o := &tls.Config{InsecureSkipVerify: true}
			if second {
				o.NextProtos = []string{"h2"}
			}
			return tls.Client(c, o)
		}
	}
	return []protocol{
		{"HTTP/1.1", false, open(false, false), askHTTP1},
		{"HTTP/1.1 over TLS", false, open(true, false), askHTTP1},
		{"HTTP/2 without TLS", true, open(false, true), askHTTP2},
		{"HTTP/2", true, open(true, true), askHTTP2},
	}
}

// askHTTP1 reads until the server closes. A chunked response is whole if its last chunk came, any other if it has its
// length.
func askHTTP1(t *testing.T, c net.Conn, path, body string) (text string, whole bool) {
	t.Helper()
	_, err := io.WriteString(c, strings.Replace(raw(path, body), "\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1))
	require.NoError(t, err)
	all, _ := io.ReadAll(c)
	head, rest, _ := strings.Cut(string(all), "\r\n\r\n")
	if _, after, ok := strings.Cut(head, "Content-Length: "); ok {
		var n int
		_, err := fmt.Sscan(after, &n)
		require.NoError(t, err)
		return head + rest, len(rest) >= n
	}
	return head + rest, strings.HasSuffix(rest, "0\r\n\r\n")
}

// requestHTTP2 is as much of RFC 9113 as it takes to send one request.
func requestHTTP2(path, body string) []byte {
	frame := func(kind, flags byte, stream uint32, payload []byte) []byte {
		b := []byte{byte(len(payload) >> 16), byte(len(payload) >> 8), byte(len(payload)), kind, flags}
		return append(binary.BigEndian.AppendUint32(b, stream), payload...)
	}
	var fields []byte // HPACK: literals that are not indexed
	for _, f := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "x"}, {":path", path},
		{"content-type", "application/json"}} {
		fields = append(append(append(append(fields, 0, byte(len(f[0]))), f[0]...), byte(len(f[1]))), f[1]...)
	}
	var out bytes.Buffer
	out.WriteString("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	out.Write(frame(4, 0, 0, nil))          // SETTINGS
	out.Write(frame(1, 4, 1, fields))       // HEADERS, END_HEADERS
	out.Write(frame(0, 1, 1, []byte(body))) // DATA, END_STREAM
	return out.Bytes()
}

// askHTTP2 sends a request and reads frames until its stream ends.
func askHTTP2(t *testing.T, c net.Conn, path, body string) (text string, whole bool) {
	t.Helper()
	_, err := c.Write(requestHTTP2(path, body))
	require.NoError(t, err)
	var data strings.Builder
	for head := make([]byte, 9); ; {
		if _, err := io.ReadFull(c, head); err != nil {
			return data.String(), false
		}
		payload := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		_, err := io.ReadFull(c, payload)
		require.NoError(t, err)
		if binary.BigEndian.Uint32(head[5:]) != 1 {
			continue
		}
		switch head[3] {
		case 0: // DATA
			data.Write(payload)
		case 3: // RST_STREAM
			return data.String(), false
		}
		if head[3] <= 1 && head[4]&1 != 0 { // END_STREAM
			return data.String(), true
		}
	}
}

func TestACutResponseIsNotEndedWhoeverRecovers(t *testing.T) {
	for _, p := range protocols() {
		for host, around := range map[string]func(http.Handler) http.Handler{
			"nobody recovers": plain, "a middleware recovers": unwrapped,
		} {
			t.Run(p.name+", "+host, func(t *testing.T) {
				x := script(t, &fake{}, answer(ok), breaks("text/event-stream", "", begun))
				c := p.listen(t, around(x.flow))
				text, whole := p.ask(t, c, "/v1/completions", completion("a", `"stream":true`))
				assert.Contains(t, text, begun, "what was read did not reach the client before the cut")
				assert.NotContains(t, text, "error", "a connection that is cut needs no words")
				assert.NotContains(t, text, "recovered")
				assert.False(t, whole, "the response was ended as a whole one is")
				require.Equal(t, pdflow.CodeStreamBroken, last(x).Err.Code)
			})
		}
	}
}

func TestACutJSONResponseIsNotEndedWhoeverRecovers(t *testing.T) {
	for _, p := range protocols() {
		for _, length := range []string{"", "500"} {
			t.Run(p.name+", length "+length, func(t *testing.T) {
				x := script(t, &fake{}, answer(ok), breaks("application/json", length, `{"choices":[{"text":"begun`))
				text, whole := p.ask(t, p.listen(t, unwrapped(x.flow)), "/v1/completions", completion("a", ""))
				assert.Contains(t, text, "begun")
				assert.False(t, whole)
			})
		}
	}
}

// If the flow cannot reach the connection and a middleware swallows the panic, the server ends the response as if it
// were whole. Then the last event is an error in the API's shape, and [DONE] does not come.
func TestACutStreamThatCannotBeCutEndsInAnError(t *testing.T) {
	half := begun + `data: {"choices":[{"ind`
	for name, c := range map[string]struct {
		around func(http.Handler) http.Handler
		path   string
		body   string
		text   string
		event  string
	}{
		"hidden":           {hidden, "/v1/completions", completion("a", `"stream":true`), begun, "data: "},
		"hidden, flushing": {flushed, "/v1/completions", completion("a", `"stream":true`), begun, "data: "},
		"amid an event":    {hidden, "/v1/chat/completions", `{"messages":[],"stream":true}`, half, "data: "},
		"Anthropic's shape": {hidden, "/v1/messages", `{"messages":[],"max_tokens":5,"stream":true}`,
			"event: content_block_delta\n" + `data: {"type":"content_block_delta","delta":{"text":"begun"}}` + "\n\n",
			"event: error\ndata: "},
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{}, answer(ok), breaks("text/event-stream", "", c.text))
			r := post(t, serve(t, c.around(x.flow)), c.path, c.body)
			require.NoError(t, r.err)
			require.Contains(t, r.body, "begun")
			require.NotContains(t, r.body, "[DONE]")
			text := strings.TrimSuffix(strings.TrimSuffix(r.body, "recovered"), "\n\n")
			event := text[strings.LastIndex(text, "\n\n")+2:]
			object, found := strings.CutPrefix(event, c.event)
			require.True(t, found, event)
			var e struct {
				Type  string
				Error struct{ Message, Type string }
			}
			require.NoError(t, json.Unmarshal([]byte(object), &e), object)
			require.Equal(t, "api_error", e.Error.Type)
			require.NotEmpty(t, e.Error.Message)
			require.Equal(t, c.path == "/v1/messages", e.Type == "error")
		})
	}
}

func TestACutJSONResponseThatCannotBeCutIsNoJSON(t *testing.T) {
	for name, text := range map[string]string{
		"amid a string":       `{"choices":[{"text":"begun`,
		"after its last byte": `{"choices":[{"text":"begun"}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{}, answer(ok), breaks("application/json", "", text))
			r := post(t, serve(t, hidden(x.flow)), "/v1/completions", completion("a", ""))
			require.Contains(t, r.body, text)
			require.False(t, json.Valid([]byte(strings.TrimSuffix(r.body, "recovered"))), r.body)
		})
	}
	x := script(t, &fake{}, answer(ok), breaks("application/json", "500", `{"choices":[{"text":"begun`))
	r := post(t, serve(t, hidden(x.flow)), "/v1/completions", completion("a", ""))
	require.Error(t, r.err, "shorter than its Content-Length")
}

// A response over HTTP/1.0 without a length ends with its connection: only its content can say that it was cut.
func TestACutStreamOverHTTP10EndsInAnError(t *testing.T) {
	x := script(t, &fake{}, answer(ok), breaks("text/event-stream", "", begun))
	request := raw("/v1/completions", completion("a", `"stream":true`))
	c := dial(t, x.url, strings.Replace(request, "HTTP/1.1", "HTTP/1.0", 1))
	all, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Contains(t, string(all), begun+"\n\ndata: {\"error\":")
}

// A client that has closed only its sending side must not read a 200 that no engine has sent.
func TestAClientThatLeftGetsNoFalseResponseWhoeverRecovers(t *testing.T) {
	x := script(t, &fake{}, gone, answer(ok))
	c := dial(t, serve(t, unwrapped(x.flow)), raw("/v1/completions", completion("a", "")))
	require.NoError(t, c.CloseWrite())
	got, _ := io.ReadAll(c)
	require.Empty(t, string(got))
	x = script(t, &fake{}, gone, answer(ok))
	c = dial(t, serve(t, hidden(x.flow)), raw("/v1/completions", completion("a", "")))
	require.NoError(t, c.CloseWrite())
	got, _ = io.ReadAll(c)
	require.Contains(t, string(got), "499")
}
