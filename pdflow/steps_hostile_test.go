// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// stuck is the body of a response whose Read ends only with Close, as with a client that does not use the step's
// Context.
type stuck struct {
	closed chan struct{}
	once   sync.Once
}

func newStuck() *stuck { return &stuck{closed: make(chan struct{})} }

func (s *stuck) Read([]byte) (int, error) { <-s.closed; return 0, errors.New("closed") }
func (s *stuck) Close() error             { s.once.Do(func() { close(s.closed) }); return nil }

// within fails the test if do does not return soon.
func within(t *testing.T, what string, do func()) {
	t.Helper()
	ended := make(chan struct{})
	go func() { defer close(ended); do() }()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Errorf("%s hangs", what)
	}
}

// End, and the limit for forgotten requests, also end a request whose response's body depends on no context.
func TestEndClosesABodyThatBlocks(t *testing.T) {
	for name, order := range map[string]connector.Order{"prefill": connector.PrefillThenDecode,
		"decode": connector.PrefillThenDecode, "beside": connector.Together} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{order: order}, answer(ok), answer(fromD))
			s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
			step, _, err := s.Next(context.Background())
			require.NoError(t, err)
			body := newStuck()
			defer body.Close()
			if name == "decode" {
				_, _ = step.Take()
				step.Done(&http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(ok))}, nil)
				step, _, err = s.Next(context.Background())
				require.NoError(t, err)
			}
			_, err = step.Take()
			require.NoError(t, err)
			step.Done(&http.Response{StatusCode: 200, Body: body}, nil)
			within(t, "End", func() { s.End(nil) })
		})
	}
}

// streamsOn is an engine that sends one event, and then nothing until the flow closes the connection.
func streamsOn(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
	_ = http.NewResponseController(w).Flush()
	gone(x, w, r, b)
}

// Close of the response's Body, and End, do not wait for a Read of another goroutine.
func TestEndWhileTheBodyIsRead(t *testing.T) {
	for name, end := range map[string]func(*pdflow.Steps, *pdflow.Response){
		"End":   func(s *pdflow.Steps, _ *pdflow.Response) { s.End(nil) },
		"Close": func(_ *pdflow.Steps, r *pdflow.Response) { _ = r.Body.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{}, answer(ok), streamsOn)
			s := begin(t, x.flow, `{"prompt":"hi","stream":true}`, nil)
			_, resp, err := drive(t, s)
			require.NoError(t, err)
			reading := make(chan struct{})
			var wg sync.WaitGroup
			wg.Go(func() {
				buf := make([]byte, 1<<10)
				_, _ = resp.Body.Read(buf)
				close(reading)
				_, err := resp.Body.Read(buf)
				assert.Error(t, err)
			})
			<-reading
			time.Sleep(10 * time.Millisecond) // the second Read most likely waits; both ways must do
			within(t, name, func() { end(s, resp) })
			s.End(nil)
			wg.Wait()
			require.Len(t, x.seen.list(), 1)
			assert.Equal(t, pdflow.CodeClientGone, x.seen.list()[0].Err.Code)
		})
	}
}

// A host that closes the response before End has ended the request: nobody sends a clean-up's side calls then.
func TestClosingTheBodyEndsTheRequest(t *testing.T) {
	asked := make(chan error, 1)
	x := script(t, &callingCleaner{asked: asked}, answer(ok), streamsOn)
	s := begin(t, x.flow, `{"prompt":"hi","stream":true}`, nil)
	_, resp, err := drive(t, s)
	require.NoError(t, err)
	within(t, "Close", func() { _ = resp.Body.Close() })
	require.Error(t, <-asked)
}

// After its end a request keeps no resources in the caller's context, which may live as long as the program.
func TestEndLetsGoOfTheCallersContext(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	parent := &counted{Context: context.Background(), done: make(chan struct{})}
	s, err := x.flow.Begin(parent, &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`)})
	require.NoError(t, err)
	_, resp, err := drive(t, s)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	s.End(nil)
	require.Eventually(t, func() bool { return parent.children() == 0 }, 10*time.Second, time.Millisecond)
}

// counted is a context that knows how many others wait for its end.
type counted struct {
	context.Context
	done chan struct{}
	mu   sync.Mutex
	n    int
}

func (c *counted) Done() <-chan struct{} { return c.done }
func (c *counted) Err() error            { return nil }
func (c *counted) children() int         { c.mu.Lock(); defer c.mu.Unlock(); return c.n }

// AfterFunc is how package context registers a child.
func (c *counted) AfterFunc(func()) func() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	var once sync.Once
	return func() bool {
		once.Do(func() { c.mu.Lock(); defer c.mu.Unlock(); c.n-- })
		return true
	}
}

// A response that comes with an error is closed.
func TestDoneWithResponseAndError(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
	step, _, err := s.Next(context.Background())
	require.NoError(t, err)
	_, err = step.Take()
	require.NoError(t, err)
	body := &closing{Reader: strings.NewReader(ok)}
	step.Done(&http.Response{StatusCode: 200, Body: body}, errors.New("redirected"))
	_, _, err = s.Next(context.Background())
	assert.ErrorIs(t, err, pdflow.CodePrefillFailed)
	assert.True(t, body.closed)
}

// The limit ends a forgotten request whatever it waits for.
func TestAForgottenRequestThatBlocksIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := inMemory(t, 0, pdflow.WithTimeouts(config.Timeouts{Steps: 50 * time.Millisecond}),
			pdflow.WithTimeouts(config.Timeouts{Prefill: config.None}))
		s := begin(t, f.flow, `{"prompt":"hi"}`, nil)
		step, _, err := s.Next(t.Context())
		require.NoError(t, err)
		_, err = step.Take()
		require.NoError(t, err)
		body := newStuck()
		defer body.Close()
		step.Done(&http.Response{StatusCode: 200, Body: body}, nil)
		time.Sleep(51 * time.Millisecond)
		synctest.Wait()
		assert.Empty(t, f.flow.Sessions())
	})
}

// The methods of a step may be called while its request fails. The race detector checks that.
func TestAStepIsAskedWhileItsRequestFails(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	for range 20 {
		s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
		step, _, err := s.Next(context.Background())
		require.NoError(t, err)
		over := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				_, _ = step.Take()
				select {
				case <-over:
					_, err := step.Take()
					assert.ErrorIs(t, err, pdflow.CodePrefillFailed)
					return
				default:
				}
			}
		})
		step.Done(&http.Response{StatusCode: 500}, nil)
		_, _, err = s.Next(context.Background())
		assert.ErrorIs(t, err, pdflow.CodePrefillFailed)
		close(over)
		wg.Wait()
		s.End(nil)
	}
}

// A request that is ended while its response is sent is an error of Send's, and no panic.
func TestEndWhileTheResponseIsSent(t *testing.T) {
	x := script(t, &fake{}, answer(ok), streamsOn)
	s := begin(t, x.flow, `{"prompt":"hi","stream":true}`, nil)
	_, resp, err := drive(t, s)
	require.NoError(t, err)
	w := &first{ResponseWriter: httptest.NewRecorder(), written: make(chan struct{})}
	sent := make(chan error, 1)
	go func() { sent <- resp.Send(w, httptest.NewRequest(http.MethodPost, "/v1/completions", http.NoBody)) }()
	<-w.written
	s.End(nil)
	err = <-sent
	assert.ErrorIs(t, err, pdflow.CodeClientGone)
}

// first is a writer that signals its first Write, and returns from it only when the request has ended.
type first struct {
	http.ResponseWriter
	once    sync.Once
	written chan struct{}
}

func (f *first) Write(p []byte) (int, error) {
	f.once.Do(func() { close(f.written); time.Sleep(20 * time.Millisecond) })
	return f.ResponseWriter.Write(p)
}

// As with net/http's own, a response's body may be closed while another goroutine reads it.
func TestCloseWhileTheBodyIsReadBehindTheRoundTripper(t *testing.T) {
	x := script(t, &fake{}, answer(ok), streamsOn)
	resp, err := behind(context.Background(), t, x, "/v1/completions", `{"prompt":"hi","stream":true}`)
	require.NoError(t, err)
	buf := make([]byte, 1<<10)
	_, err = resp.Body.Read(buf)
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := resp.Body.Read(buf)
		assert.Error(t, err)
	})
	time.Sleep(10 * time.Millisecond)
	within(t, "Close", func() { _ = resp.Body.Close() })
	wg.Wait()
}

// A client that follows redirects takes the prompt nowhere else: the body of a step's request cannot be sent twice. A
// response that came after a redirect is no engine's.
func TestAFollowedRedirectTakesNoPrompt(t *testing.T) {
	var got []string
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = append(got, r.Method+string(body))
		_, _ = io.WriteString(w, ok)
	}))
	defer other.Close()
	for _, status := range []int{http.StatusFound, http.StatusTemporaryRedirect, http.StatusPermanentRedirect} {
		engine := httptest.NewServer(http.RedirectHandler(other.URL, status))
		x := script(t, &fake{}, answer(ok), answer(fromD))
		x.pair.Prefill.URL, _ = url.Parse(engine.URL)
		s := begin(t, x.flow, `{"prompt":"secret"}`, &x.pair)
		step, _, err := s.Next(t.Context())
		require.NoError(t, err)
		request, err := step.Take()
		require.NoError(t, err)
		step.Done((&http.Client{}).Do(request))
		_, resp, err := s.Next(t.Context())
		require.Nil(t, resp)
		require.Error(t, err, status)
		s.End(nil)
		engine.Close()
	}
	assert.Equal(t, []string{http.MethodGet}, got, "only 302 is followed, by a GET without the prompt")
}

// After the host's own End, Next blames nobody else.
func TestNextAfterEnd(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
	s.End(nil)
	_, _, err := s.Next(t.Context())
	require.ErrorContains(t, err, "the program that sends the legs has ended the request")
	x = script(t, &fake{}, answer(ok), answer(fromD))
	s = begin(t, x.flow, `{"prompt":"hi"}`, nil)
	defer s.End(nil)
	step, _, err := s.Next(t.Context())
	require.NoError(t, err)
	step.Done(nil, nil)
	_, _, err = s.Next(t.Context())
	require.ErrorContains(t, err, "Done needs a response or an error")
	_, err = x.flow.Begin(t.Context(), &pdflow.Request{Body: []byte("{}")})
	require.ErrorIs(t, err, pdflow.CodeNotFound, "a path that is no client API's")
}
