// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/sharedtest"
	"github.com/pdkit/pdkit/pdflow"
)

// host is a handler that calls Do and Send.
type host struct {
	flow *pdflow.Flow
	sent chan error // what Send returned
}

func (h *host) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	resp, err := h.flow.Do(r.Context(), &pdflow.Request{API: connector.APIOf(r.URL.Path), Header: r.Header, Body: body})
	if err == nil {
		err = resp.Send(w, r)
	}
	h.sent <- err
}

func TestSendWritesAsServeHTTPDoes(t *testing.T) {
	x := start(t, setup{})
	h := &host{x.flow, make(chan error, 1)}
	url := serve(t, h)
	for _, stream := range []string{"", `"stream":true`} {
		want := post(t, x.url, "/v1/completions", completion(longPrompt, stream), "X-Request-Id", "mine")
		got := post(t, url, "/v1/completions", completion(longPrompt, stream), "X-Request-Id", "mine")
		require.NoError(t, <-h.sent)
		require.Equal(t, want.text(t), got.text(t))
		for _, name := range []string{"Date", "Content-Length"} { // ids of engines differ in length
			require.Equal(t, want.header[name] == nil, got.header[name] == nil)
			delete(want.header, name)
			delete(got.header, name)
		}
		require.Equal(t, want.header, got.header)
	}
	x.idle()
	require.Empty(t, x.flow.Sessions())
}

func TestSendCutsAndSaysSo(t *testing.T) {
	x := script(t, &fake{}, answer(ok), breaks("text/event-stream", "", begun))
	h := &host{x.flow, make(chan error, 1)}
	r := post(t, serve(t, unwrapped(h)), "/v1/completions", completion("a", `"stream":true`))
	require.Error(t, r.err, r.body)
	require.Contains(t, r.body, begun)
	require.ErrorIs(t, <-h.sent, pdflow.CodeStreamBroken)
}

func TestAClosedResponseIsNotSent(t *testing.T) {
	x := start(t, setup{})
	resp, err := x.flow.Do(
		t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", ""))},
	)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	w := httptest.NewRecorder()
	require.Error(t, resp.Send(w, httptest.NewRequest(http.MethodPost, "/", nil)))
	require.Empty(t, w.Body.String())
}

// endless is a decode engine that streams until nobody listens.
func endless(x *scripted, w http.ResponseWriter, r *http.Request, _ string) {
	w.Header().Set("Content-Type", "text/event-stream")
	event := []byte(`data: {"choices":[{"index":0,"text":"` + strings.Repeat("a", 8<<10) + `"}]}` + "\n\n")
	for r.Context().Err() == nil {
		if _, err := w.Write(event); err != nil {
			break
		}
	}
	x.log("freed")
}

// If a client does not read, the flow closes the decode leg after the write timeout.
func TestAClientThatReadsNothingFreesDecode(t *testing.T) {
	limits := config.Timeouts{}
	limits.Write = 50 * time.Millisecond
	for _, send := range []bool{false, true} {
		for _, p := range protocols() {
			t.Run(fmt.Sprintf("%s, Send %t", p.name, send), func(t *testing.T) {
				t.Parallel()
				x := script(t, &fake{}, answer(ok), endless, pdflow.WithTimeouts(limits))
				h, sent := http.Handler(x.flow), make(chan error, 1)
				if send {
					h = &host{x.flow, sent}
				}
				request := []byte(raw("/v1/completions", completion("a", `"stream":true`)))
				if p.second {
					request = requestHTTP2("/v1/completions", completion("a", `"stream":true`))
				}
				_, err := p.listen(t, h).Write(request)
				require.NoError(t, err)
				require.Eventually(t, func() bool { return strings.Contains(x.all(), "freed") }, 20*time.Second,
					5*time.Millisecond,
					"the decode engine still works for a client that reads nothing")
				if send {
					require.ErrorIs(t, <-sent, pdflow.CodeClientGone)
				}
			})
		}
	}
}

func TestAWriterThatCannotStreamIsLoggedOnceWithAllThatItLacks(t *testing.T) {
	out := &sharedtest.Log{}
	x := start(t, setup{opts: []pdflow.Option{logsTo(slog.New(slog.NewTextHandler(out, nil)))}})
	post(t, x.url, "/v1/completions", completion("a", `"stream":true`))
	require.Empty(t, out.String(), "net/http's own writer can all")
	url := serve(t, hidden(x.flow))
	for range 3 {
		post(t, url, "/v1/completions", completion("a", `"stream":true`)).text(t)
	}
	require.Equal(t, 1, strings.Count(out.String(), "level=WARN"), out.String())
	require.Contains(t, out.String(), `missing="Flush, SetReadDeadline, SetWriteDeadline"`)

	noFlush := swallow(func(w http.ResponseWriter) http.ResponseWriter { return bounded{w} })
	post(t, serve(t, noFlush(x.flow)), "/v1/completions", completion("a", `"stream":true`)).text(t)
	require.Equal(t, 2, strings.Count(out.String(), "level=WARN"), "another writer of the same flow: %s", out)
	require.Contains(t, out.String(), `writer=pdflow_test.bounded missing="Flush, SetReadDeadline"`)
}

// bounded is a writer that supports write deadlines, but not Flush.
type bounded struct{ http.ResponseWriter }

func (b bounded) SetWriteDeadline(t time.Time) error {
	return http.NewResponseController(b.ResponseWriter).SetWriteDeadline(t)
}

// failing is a writer whose first write fails, like one on the connection of a client that has left.
type failing struct{ *httptest.ResponseRecorder }

func (failing) Write([]byte) (int, error) { return 0, net.ErrClosed }

func TestAFailedWriteIsTheClientsLeaving(t *testing.T) {
	x := start(t, setup{})
	resp, err := x.flow.Do(context.Background(),
		&pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", ""))})
	require.NoError(t, err)
	err = resp.Send(failing{httptest.NewRecorder()}, httptest.NewRequest(http.MethodPost, "/", nil))
	assert.ErrorIs(t, err, pdflow.CodeClientGone)
	assert.ErrorIs(t, err, net.ErrClosed)
	require.Equal(t, pdflow.CodeClientGone, x.seen.list()[0].Err.Code)
}

// slow is a decode engine that waits before its first event, and then streams four with 200 ms after each.
func slow(before time.Duration) handler {
	return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		time.Sleep(before)
		w.Header().Set("Content-Type", "text/event-stream")
		for range 4 {
			_, _ = io.WriteString(w, begun)
			_ = http.NewResponseController(w).Flush()
			time.Sleep(200 * time.Millisecond)
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	}
}

// The flow's deadline of each write replaces the deadline that the server's WriteTimeout has set. So WriteTimeout ends
// a response only where the flow sets no deadline: Timeouts.Write is none, or middleware hides SetWriteDeadline. Over
// HTTP/2 it also ends a response of which nothing has been written when it passes.
func TestAServersWriteTimeoutEndsOnlyWhatTheFlowDoesNotBound(t *testing.T) {
	const writeTimeout, later = 300 * time.Millisecond, 500 * time.Millisecond
	same := func(h http.Handler) http.Handler { return h }
	hides := func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { h.ServeHTTP(flushing{w}, r) })
	}
	for name, c := range map[string]struct {
		wrap        func(http.Handler) http.Handler
		decode      handler
		write       time.Duration
		second, cut bool
	}{
		"a long stream":                            {same, slow(0), 0, false, false},
		"a long stream over HTTP/2":                {same, slow(0), 0, true, false},
		"a long stream behind a writer that hides": {hides, slow(0), 0, false, true},
		"a long stream without a limit of a write": {same, slow(0), config.None, false, true},
		"a late first event":                       {same, slow(later), 0, false, false},
		"a late first event over HTTP/2":           {same, slow(later), 0, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limits := config.Timeouts{}
			limits.Write = c.write
			x := script(t, &fake{}, answer(ok), c.decode, pdflow.WithTimeouts(limits))
			server := httptest.NewUnstartedServer(c.wrap(x.flow))
			server.Config.WriteTimeout = writeTimeout
			server.EnableHTTP2 = c.second
			server.StartTLS()
			t.Cleanup(server.Close)
			body := completion("a", `"stream":true`)
			resp, err := server.Client().Post(server.URL+"/v1/completions", "application/json", strings.NewReader(body))
			var got []byte
			if err == nil {
				require.Equal(t, c.second, resp.ProtoMajor == 2)
				got, err = io.ReadAll(resp.Body)
				require.NoError(t, resp.Body.Close())
			}
			require.Equal(t, c.cut, err != nil, "%v", err)
			require.Equal(t, c.cut, !strings.HasSuffix(string(got), "data: [DONE]\n\n"), "%s", got)
		})
	}
}

// The limit of a write is not one of the silence after it: over HTTP/2, net/http resets a stream when its write
// deadline passes, also while nothing is written.
func TestAStreamMayBeSilentForLongerThanAWriteMayTake(t *testing.T) {
	for _, p := range protocols() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			decode := stream(2500*time.Millisecond, `{"choices":[{"index":0,"text":"begun"}]}`)
			x := script(t, &fake{}, answer(ok), decode,
				pdflow.WithTimeouts(config.Timeouts{Write: 100 * time.Millisecond}))
			text, whole := p.ask(t, p.listen(t, x.flow), "/v1/completions", completion("a", `"stream":true`))
			assert.Contains(t, text, "[DONE]")
			assert.True(t, whole)
		})
	}
}
