// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

const (
	keepAlive = ": keep-alive\n\n"
	pinged    = "event: ping\ndata: {\"type\": \"ping\"}\n\n"
	role      = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}` + "\n\n"
	spoken    = `data: {"choices":[{"index":0,"delta":{"content":"a"}}]}` + "\n\n"
	ended     = "data: [DONE]\n\n"
)

// keptClient is a client that waits, and notes what comes when.
type keptClient struct {
	*httptest.ResponseRecorder
	start    time.Time
	came     []string // as "15s: what"
	deadline time.Time
	unbound  int // writes without a deadline
	heads    int
	write    func() error
	handed   bool // the handler has returned
}

func newKeptClient() *keptClient {
	return &keptClient{ResponseRecorder: httptest.NewRecorder(), start: time.Now(), write: func() error { return nil }}
}

func (c *keptClient) SetWriteDeadline(d time.Time) error { c.deadline = d; return nil }
func (c *keptClient) FlushError() error                  { return nil }

func (c *keptClient) WriteHeader(status int) {
	c.heads++
	c.ResponseRecorder.WriteHeader(status)
}

func (c *keptClient) Write(b []byte) (int, error) {
	if c.handed {
		panic("a write after the handler has returned")
	}
	if err := c.write(); err != nil {
		return 0, err
	}
	if c.deadline.IsZero() {
		c.unbound++
	}
	c.heads = max(c.heads, 1)
	c.came = append(c.came, fmt.Sprint(time.Since(c.start).Round(10*time.Millisecond), ": ", string(b)))
	return c.ResponseRecorder.Write(b)
}

// serves has the handler serve a request of the API at path, streamed unless more says otherwise.
func (c *keptClient) serves(h http.Handler, path string, more ...string) {
	if len(more) == 0 {
		more = []string{`,"stream":true`}
	}
	body := `{"model":"m","prompt":"hi","max_tokens":9,"input":"hi",` +
		`"messages":[{"role":"user","content":"hi"}]` + strings.Join(more, "") + `}`
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	h.ServeHTTP(c, r)
	c.handed = true
}

// inFakeTime runs a fleet of engines with keep-alive after 15 s.
func inFakeTime(t *testing.T, names string, answer func(host string, nth int) response,
	test func(t *testing.T, f *fakeFleet, c *keptClient), opts ...pdflow.Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, names, config.Retry{MaxAttempts: 2, BackoffBase: time.Millisecond}, answer,
			append([]pdflow.Option{pdflow.WithKeepAlive(15 * time.Second), pdflow.WithTimeouts(config.Timeouts{
				Prefill: time.Hour, Decode: time.Hour, Idle: time.Hour})}, opts...)...)
		test(t, f, newKeptClient())
	})
}

// slowPrefill is a pair of which P takes its time.
func slowPrefill(d time.Duration, decode response) func(string, int) response {
	return func(host string, _ int) response {
		if host[0] == 'p' {
			return after(d, replies(200))
		}
		return decode
	}
}

// A prefill of 50 s: balancers see a byte each 15 s, and the client gets what it would have got without them.
func TestAClientThatWaitsIsKeptAlive(t *testing.T) {
	for path, c := range map[string]struct{ beat, stream string }{
		"/v1/chat/completions": {keepAlive, role + spoken + ended},
		"/v1/completions":      {keepAlive, begun + ended},
		"/v1/responses": {keepAlive, "event: response.created\n" + `data: {"type":"response.created"}` + "\n\n" +
			"event: response.output_text.delta\n" + `data: {"type":"response.output_text.delta","delta":"a"}` + "\n\n"},
		"/v1/messages": {pinged, "event: message_start\n" + `data: {"type":"message_start","message":{}}` + "\n\n" +
			"event: content_block_delta\n" + `data: {"type":"content_block_delta","delta":{"text":"a"}}` + "\n\n"},
	} {
		t.Run(path, func(t *testing.T) {
			inFakeTime(t, "p0 d0", slowPrefill(50*time.Second, streaming(0, io.EOF, c.stream)),
				func(t *testing.T, f *fakeFleet, w *keptClient) {
					w.serves(f.flow, path)
					assert.Equal(t, []string{"15s: " + c.beat, "30s: " + c.beat, "45s: " + c.beat, "50s: " + c.stream},
						w.came)
					assert.Equal(t, http.StatusOK, w.Code)
					h := w.Result().Header
					assert.Equal(t, "text/event-stream; charset=utf-8", h.Get("Content-Type"))
					assert.Equal(t, "no", h.Get("X-Accel-Buffering"))
					assert.Len(t, h["X-Request-Id"], 1)
					assert.Empty(t, h["X-Pd-Mode"], "nobody knew it")
					assert.Zero(t, w.unbound, "writes without a limit")
					assert.True(t, w.deadline.IsZero(), "the connection serves more requests")
					assert.Equal(t, pdflow.ModeDisaggregated, f.seen.list()[0].Mode)
				})
		})
	}
}

// What is known in time is as without keep-alive, and so is what is not streamed: head, status and bytes.
func TestAResponseInTimeIsAsWithoutKeepAlive(t *testing.T) {
	halves := func(*http.Request) (*http.Response, error) {
		out, in := io.Pipe()
		go func() {
			_, _ = io.WriteString(in, ok[:9])
			time.Sleep(time.Minute)
			_, _ = io.WriteString(in, ok[9:])
			_ = in.Close()
		}()
		return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"application/json"}}, Body: out,
			ContentLength: int64(len(ok))}, nil
	}
	for name, c := range map[string]struct {
		stream bool
		answer func(string, int) response
		status int
	}{
		"a stream":                {true, slowPrefill(14*time.Second, streaming(0, io.EOF, begun+ended)), 200},
		"an error":                {true, slowPrefill(7*time.Second, replies(500)), 500},
		"a 400":                   {true, slowPrefill(14*time.Second, replies(400)), 400},
		"no stream, though asked": {true, slowPrefill(14*time.Second, halves), 200},
		"no stream":               {false, slowPrefill(time.Minute, halves), 200},
	} {
		t.Run(name, func(t *testing.T) {
			var got [2]*keptClient
			for i, after := range []time.Duration{0, 15 * time.Second} {
				inFakeTime(t, "p0 d0", c.answer, func(_ *testing.T, f *fakeFleet, w *keptClient) {
					got[i] = w
					w.serves(f.flow, "/v1/completions", fmt.Sprintf(`,"stream":%t`, c.stream))
				}, pdflow.WithKeepAlive(after))
			}
			without, with := got[0], got[1]
			assert.Equal(t, c.status, without.Code)
			assert.Equal(t, without.Code, with.Code)
			assert.Equal(t, without.came, with.came)
			withoutHead, withHead := without.Result().Header, with.Result().Header
			delete(withoutHead, "X-Request-Id")
			delete(withHead, "X-Request-Id")
			assert.Equal(t, withoutHead, withHead)
		})
	}
}

// Attempts and their retries go on behind it: the client waits, and gets one stream.
func TestFailoverGoesOnBehindKeepAlive(t *testing.T) {
	inFakeTime(t, "p0 p1 d0", func(host string, _ int) response {
		switch host {
		case "p0":
			return after(20*time.Second, replies(500))
		case "p1":
			return after(20*time.Second, replies(200))
		}
		return streaming(0, io.EOF, begun+ended)
	}, func(t *testing.T, f *fakeFleet, _ *keptClient) {
		for range 2 { // one of them begins with p0
			w := newKeptClient()
			w.serves(f.flow, "/v1/completions")
			assert.True(t, strings.HasSuffix(w.Body.String(), keepAlive+begun+ended), w.Body.String())
			assert.Equal(t, 1, strings.Count(w.Body.String(), "begun"))
		}
		assert.Contains(t, f.hosts(), "p0 p1 d0")
	})
}

// A failure after the head is an error event of the client's API, and nothing ends the stream as a whole one ends.
func TestAFailureAfterTheHeadIsAnErrorEvent(t *testing.T) {
	failure := `"message":"the prefill engine answered with an error"`
	for path, want := range map[string][]string{
		"/v1/chat/completions":   {"\n\ndata: {\"error\":{", failure, `"code":"prefill_failed"`},
		"/v1/completions":        {"\n\ndata: {\"error\":{", failure},
		"/inference/v1/generate": {"\n\ndata: {\"error\":{", failure},
		"/v1/responses": {"\n\nevent: error\ndata: {", `"type":"error"`, failure + `,"param":null,` +
			`"sequence_number":0`, `"error":{"code":"prefill_failed",` + failure},
		"/v1/messages": {"\n\nevent: error\ndata: {", `"type":"error"`, `"error":{` + failure},
	} {
		t.Run(path, func(t *testing.T) {
			failing := func(string, int) response { return after(20*time.Second, replies(500)) }
			inFakeTime(t, "p0 d0", failing, func(t *testing.T, f *fakeFleet, w *keptClient) {
				w.serves(f.flow, path, `,"stream":true,"token_ids":[1]`)
				assert.Equal(t, 200, w.Code)
				for _, part := range want {
					assert.Contains(t, w.Body.String(), part)
				}
				assert.NotContains(t, w.Body.String(), "[DONE]")
				assert.True(t, strings.HasSuffix(w.Body.String(), "}\n\n\n"), w.Body.String())
				assert.Equal(t, []string{"prefill_failed"}, f.told.labels("pd.request.duration", "error.type"))
			})
		})
	}
}

// The host's own error text is in the event.
func TestAnErrorHandlerWritesTheEventsData(t *testing.T) {
	for body, want := range map[string]string{
		"{\n\"error\": \"mine\"\n}": `data: {"error":"mine"}`, "no JSON": `"message":`,
	} {
		inFakeTime(t, "p0 d0", func(string, int) response { return after(20*time.Second, replies(500)) },
			func(t *testing.T, f *fakeFleet, w *keptClient) {
				w.serves(f.flow, "/v1/completions")
				assert.Contains(t, w.Body.String(), want)
			}, pdflow.WithErrorHandler(func(w http.ResponseWriter, _ *http.Request, e *pdflow.Error) {
				w.WriteHeader(e.HTTPStatus())
				_, _ = io.WriteString(w, body)
			}))
	}
}

// Silence in mid-stream is the same to a balancer. What is written stands between two events.
func TestASilentStreamIsKeptAlive(t *testing.T) {
	parts := func(parts ...string) response { // one each 40 s
		return func(*http.Request) (*http.Response, error) {
			out, in := io.Pipe()
			go func() {
				for i, part := range parts {
					if i > 0 {
						time.Sleep(40 * time.Second)
					}
					_, _ = io.WriteString(in, part)
				}
				_ = in.Close()
			}()
			return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}},
				ContentLength: -1, TransferEncoding: []string{"chunked"}, Body: out}, nil
		}
	}
	twice, long := keepAlive+keepAlive, "data: "+strings.Repeat("x", 9999)
	for name, c := range map[string]struct {
		parts []string
		want  string
	}{
		"between events":         {[]string{begun, begun, ended}, begun + twice + begun + twice + ended},
		"with CRLF":              {[]string{"data: {}\r\n\r\n", ended}, "data: {}\r\n\r\n" + twice + ended},
		"while only a role came": {[]string{role, spoken + ended}, twice + role + spoken + ended},
		"not within an event":    {[]string{begun + long, "\n\n", ended}, begun + long + "\n\n" + twice + ended},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeTime(t, "p0 d0", slowPrefill(0, parts(c.parts...)), func(t *testing.T, f *fakeFleet, w *keptClient) {
				w.serves(f.flow, "/v1/chat/completions")
				assert.Equal(t, c.want, w.Body.String())
				assert.Nil(t, f.seen.list()[0].Err)
				assert.Zero(t, w.unbound, "writes without a limit")
			}, pdflow.WithTimeouts(config.Timeouts{Write: time.Hour}))
		})
	}
}

// A response is whole before its legs have ended: nothing is written behind its end.
func TestNothingIsWrittenBehindTheEndOfAStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		together := &fake{order: connector.Together}
		f := newFakeFleet(t, together, "p0 d0", config.Retry{}, func(host string, _ int) response {
			if host == "d0" {
				return after(20*time.Second, streaming(0, io.EOF, begun+ended))
			}
			return func(r *http.Request) (*http.Response, error) { // which takes its time to end
				<-r.Context().Done()
				time.Sleep(40 * time.Second)
				return nil, r.Context().Err()
			}
		}, pdflow.WithKeepAlive(15*time.Second), pdflow.WithTimeouts(config.Timeouts{Prefill: time.Hour,
			Decode: time.Hour}))
		w := newKeptClient()
		w.serves(f.flow, "/v1/completions")
		assert.Equal(t, keepAlive+begun+ended, w.Body.String())
	})
}

// What keep-alive writes takes no limit from the write that follows.
func TestAWriteBesideKeepAliveHasItsLimit(t *testing.T) {
	decode := func(*http.Request) (*http.Response, error) {
		out, in := io.Pipe()
		go func() {
			_, _ = io.WriteString(in, begun)
			time.Sleep(1500 * time.Millisecond)
			_, _ = io.WriteString(in, ended)
			_ = in.Close()
		}()
		return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: out,
			ContentLength: -1, TransferEncoding: []string{"chunked"}}, nil
	}
	inFakeTime(t, "p0 d0", slowPrefill(0, decode), func(t *testing.T, f *fakeFleet, w *keptClient) {
		w.serves(f.flow, "/v1/completions")
		assert.Equal(t, begun+keepAlive+ended, w.Body.String())
		assert.Zero(t, w.unbound)
	}, pdflow.WithKeepAlive(time.Second))
}

// A stream whose head was early breaks: the client gets the error, and no end.
func TestAStreamThatBreaksAfterAnEarlyHeadTellsIt(t *testing.T) {
	for name, decode := range map[string]response{
		"in mid-stream":  streaming(time.Second, errors.New("broken"), begun),
		"never a stream": replies(200),
	} {
		t.Run(name, func(t *testing.T) {
			answer := slowPrefill(20*time.Second, decode)
			inFakeTime(t, "p0 d0", answer, func(t *testing.T, f *fakeFleet, w *keptClient) {
				w.serves(f.flow, "/v1/completions")
				assert.Contains(t, w.Body.String(), "\n\ndata: {\"error\":{")
				assert.NotContains(t, w.Body.String(), "[DONE]")
				assert.NotContains(t, w.Body.String(), `"object"`)
				assert.NotNil(t, f.seen.list()[0].Err)
			})
		})
	}
}

// A client that cannot be written to has left: its legs end within an interval.
func TestAClientThatLeavesWhileItWaitsEndsItsLegs(t *testing.T) {
	for name, c := range map[string]struct {
		second func() error
		code   pdflow.Code
	}{
		"a write fails":                {func() error { return errors.New("broken pipe") }, pdflow.CodeClientGone},
		"a middleware's writer panics": {func() error { panic("boom") }, pdflow.CodeInternal},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeTime(t, "p0 d0", func(string, int) response { return hangs },
				func(t *testing.T, f *fakeFleet, w *keptClient) {
					writes := 0
					w.write = func() error {
						switch writes++; writes {
						case 1:
							return nil
						case 2:
							return c.second()
						}
						return errors.New("gone")
					}
					w.serves(f.flow, "/v1/completions")
					assert.Equal(t, 30*time.Second, time.Since(w.start))
					assert.Equal(t, c.code, f.seen.list()[0].Err.Code)
				})
		})
	}
}

// The response comes in the moment in which the timer fires: one head, and no write of two at a time (with -race).
func TestAResponseAndKeepAliveMayMeet(t *testing.T) {
	for range 200 {
		inFakeTime(t, "p0 d0", slowPrefill(15*time.Second, streaming(15*time.Second, io.EOF, begun+ended)),
			func(t *testing.T, f *fakeFleet, w *keptClient) {
				w.serves(f.flow, "/v1/completions")
				assert.Equal(t, begun+ended, strings.ReplaceAll(w.Body.String(), keepAlive, ""))
				early := strings.HasPrefix(w.Body.String(), keepAlive)
				assert.Equal(t, early, w.Result().Header["X-Pd-Mode"] == nil)
				assert.Equal(t, 1, w.heads)
			})
	}
}

// Where a late error could not be told, or nothing would go out, nothing is written: before a stream, and within it.
func TestWhereNothingIsKeptAlive(t *testing.T) {
	for name, change := range map[string]func(*http.Request, http.ResponseWriter) http.ResponseWriter{
		"over HTTP/1.0": func(r *http.Request, w http.ResponseWriter) http.ResponseWriter {
			r.Proto, r.ProtoMinor = "HTTP/1.0", 0
			return w
		},
		"a writer that cannot flush": func(_ *http.Request, w http.ResponseWriter) http.ResponseWriter {
			return opaque{w}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for status, answer := range map[int]func(string, int) response{
				200: slowPrefill(40*time.Second, streaming(40*time.Second, io.EOF, begun)),
				502: func(string, int) response { return after(40*time.Second, replies(500)) },
			} {
				inFakeTime(t, "p0 d0", answer, func(t *testing.T, f *fakeFleet, w *keptClient) {
					w.serves(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						f.flow.ServeHTTP(change(r, w), r)
					}), "/v1/completions")
					assert.Equal(t, status, w.Code)
					assert.Equal(t, status == 200, f.seen.list()[0].Err == nil)
					assert.NotContains(t, w.Body.String(), keepAlive)
				})
			}
		})
	}
}

// A flow that is shut down hands its request to its successor, behind a head that is out.
func TestASuccessorServesBehindAnEarlyHead(t *testing.T) {
	for name, successor := range map[string]time.Duration{"with keep-alive": 15 * time.Second, "without": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				limits := pdflow.WithTimeouts(config.Timeouts{Prefill: time.Hour})
				first := newFakeFleet(t, &fake{}, "p0 d0", config.Retry{}, func(string, int) response { return hangs },
					pdflow.WithKeepAlive(15*time.Second), limits)
				second := newFakeFleet(t, &fake{}, "p1 d1", config.Retry{},
					slowPrefill(10*time.Second, streaming(0, io.EOF, begun+ended)),
					pdflow.WithKeepAlive(successor), limits)
				m := newMux(t)
				require.NoError(t, m.SetRoutes(map[string]pdflow.Server{"": first.flow}))
				go func() {
					time.Sleep(20 * time.Second)
					assert.NoError(t, m.SetRoutes(map[string]pdflow.Server{"": second.flow}))
					ctx, stop := context.WithCancel(context.Background())
					stop()
					_ = first.flow.Shutdown(ctx)
				}()
				w := newKeptClient()
				w.serves(m, "/v1/completions")
				assert.Equal(t, begun+ended, strings.ReplaceAll(w.Body.String(), keepAlive, ""))
				assert.True(t, strings.HasPrefix(w.Body.String(), keepAlive))
				assert.Equal(t, 1, w.heads)
			})
		})
	}
}

// A failure after an early head, also in mid-stream, reaches the client before the connection is cut, over each
// protocol and whoever recovers.
func TestAnEarlyHeadsErrorArrivesBeforeTheCut(t *testing.T) {
	for _, p := range protocols() {
		for host, around := range map[string]func(http.Handler) http.Handler{
			"nobody recovers": plain, "a middleware recovers": unwrapped,
		} {
			for code, prefill := range map[string]handler{"prefill_failed": status(500), "stream_broken": answer(ok)} {
				t.Run(p.name+", "+host+", "+code, func(t *testing.T) {
					x := script(t, &fake{}, func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
						time.Sleep(200 * time.Millisecond)
						prefill(x, w, r, body)
					}, breaks("text/event-stream", "", begun), pdflow.WithKeepAlive(50*time.Millisecond))
					c := p.listen(t, around(x.flow))
					text, whole := p.ask(t, c, "/v1/completions", completion("a", `"stream":true`))
					assert.Contains(t, text, ": keep-alive\n")
					assert.Contains(t, text, `data: {"error":{"code":"`+code+`"`)
					assert.Equal(t, code == "stream_broken", strings.Contains(text, begun))
					assert.NotContains(t, text, "recovered")
					assert.False(t, whole)
				})
			}
		}
	}
}

// balancer passes connections on, and cuts one on which its server sends nothing for a time.
func balancer(t *testing.T, to string, idle time.Duration) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var all sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", strings.TrimPrefix(to, "http://"))
			if err != nil {
				_ = c.Close()
				continue
			}
			all.Go(func() { _, _ = io.Copy(s, c); _ = s.Close() })
			all.Go(func() {
				defer c.Close()
				defer s.Close()
				for b := make([]byte, 4096); ; {
					_ = s.SetReadDeadline(time.Now().Add(idle))
					n, err := s.Read(b)
					if err != nil {
						return
					}
					if _, err = c.Write(b[:n]); err != nil {
						return
					}
				}
			})
		}
	})
	return "http://" + l.Addr().String()
}

// A balancer in front cuts what it takes for dead: with a slow prefill that was every request.
func TestABalancerDoesNotCutWhoIsKeptAlive(t *testing.T) {
	for name, after := range map[string]time.Duration{"without": 0, "with": 100 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			x := start(t, setup{opts: []pdflow.Option{pdflow.WithKeepAlive(after)}})
			x.p.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 1500 * time.Millisecond})
			front := balancer(t, x.url, 500*time.Millisecond)
			r := post(t, front, "/v1/completions", completion(longPrompt, `"stream":true`))
			if x.idle(); after == 0 {
				require.Error(t, r.err)
				return
			}
			require.Equal(t, alone(t, "/v1/completions", completion(longPrompt, "")), r.text(t))
			require.NoError(t, x.p.CheckKV())
		})
	}
}

// A client that leaves while it waits frees both engines, and the flow has nothing left of it.
func TestAClientThatLeavesBehindAnEarlyHeadFreesTheEngines(t *testing.T) {
	x := start(t, setup{opts: []pdflow.Option{pdflow.WithKeepAlive(20 * time.Millisecond)}})
	x.p.Inject(enginesim.Fault{Kind: enginesim.FaultStall})
	ctx, leave := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions",
		strings.NewReader(completion(longPrompt, `"stream":true`)))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(r)
	require.NoError(t, err)
	_, err = io.ReadFull(resp.Body, make([]byte, 3*len(keepAlive)))
	require.NoError(t, err)
	leave()
	_ = resp.Body.Close()
	x.idle()
	require.Eventually(t, func() bool { return len(x.seen.list()) == 1 && len(x.flow.Sessions()) == 0 }, 20*time.Second,
		time.Millisecond)
	require.Equal(t, pdflow.CodeClientGone, x.seen.list()[0].Err.Code)
}

// Rescue goes on as ever, and its client is kept alive while the second prefill runs.
func TestAStreamIsRescuedWhileItsClientIsKeptAlive(t *testing.T) {
	x, _ := rescuing(t, pdflow.WithKeepAlive(50*time.Millisecond))
	plain := start(t, setup{})
	for _, c := range rescueCases(9)[:2] {
		want := post(t, plain.url, c.path, c.body, "X-Request-Id", "same")
		x.p.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 200 * time.Millisecond, Count: 2})
		got := x.struck(c, enginesim.FaultResetStream, 4)
		require.NoError(t, got.err)
		require.Equal(t, sameOf(want.body), sameOf(strings.ReplaceAll(got.body, keepAlive, "")))
		require.True(t, strings.HasPrefix(got.body, keepAlive))
		require.Greater(t, strings.LastIndex(got.body, keepAlive), strings.Index(got.body, "data:"), "in mid-stream")
	}
}
