// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

const streamStart = "data: {\"choices\":[{\"text\":\"hi\"}]}\n\n"

// streams is an engine that begins a stream and ends it only when the test ends.
func streams(t *testing.T) handler {
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	return func(_ *scripted, w http.ResponseWriter, r *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, streamStart)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-over:
		case <-r.Context().Done():
		}
	}
}

// If a host closes the response without calling End, the side calls of the connector's clean-up must fail at once,
// since no host sends them any more.
func TestClosingTheResponseOfStepsDoesNotWaitForSideCalls(t *testing.T) {
	asked := make(chan error, 1)
	x := script(t, &callingCleaner{asked: asked}, answer(ok), streams(t),
		pdflow.WithTimeouts(config.Timeouts{Cleanup: config.None}))
	s := begin(t, x.flow, `{"prompt":"hi","stream":true}`, nil)
	_, resp, err := drive(t, s)
	require.NoError(t, err)
	closed := make(chan struct{})
	go func() { defer close(closed); _ = resp.Body.Close() }()
	select {
	case <-closed:
	case <-time.After(20 * time.Second):
		s.End(nil)
		t.Fatal("Close waits for somebody who sends the clean-up's call")
	}
	require.Error(t, <-asked)
}

// slowWriter holds its first write until it is released.
type slowWriter struct {
	*httptest.ResponseRecorder
	writing, release chan struct{}
}

func (w *slowWriter) Write(p []byte) (int, error) {
	if w.writing != nil {
		close(w.writing)
		w.writing = nil
		<-w.release
	}
	return w.ResponseRecorder.Write(p)
}

// End may come from another goroutine while the response is being sent.
func TestEndingStepsWhileTheResponseIsSent(t *testing.T) {
	x := script(t, &fake{}, answer(ok), streams(t))
	s := begin(t, x.flow, `{"prompt":"hi","stream":true}`, nil)
	_, resp, err := drive(t, s)
	require.NoError(t, err)
	w := &slowWriter{httptest.NewRecorder(), make(chan struct{}), make(chan struct{})}
	writing, sent := w.writing, make(chan error, 1)
	go func() {
		defer func() {
			if r := recover(); r != nil {
				sent <- errors.New("panic")
			}
		}()
		sent <- resp.Send(w, httptest.NewRequest(http.MethodPost, "/v1/completions", nil))
	}()
	<-writing
	s.End(nil)
	close(w.release)
	require.ErrorIs(t, <-sent, pdflow.CodeClientGone)
	assert.NotContains(t, w.Body.String(), "[DONE]")
	require.Error(t, resp.Send(w, httptest.NewRequest(http.MethodPost, "/v1/completions", nil)), "it is closed")
}

// End while the response is being read ends the read, and nothing else.
func TestEndingStepsWhileTheResponseIsRead(t *testing.T) {
	x := script(t, &fake{}, answer(ok), streams(t))
	for range 20 {
		s := begin(t, x.flow, `{"prompt":"hi","stream":true}`, nil)
		_, resp, err := drive(t, s)
		require.NoError(t, err)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for p := make([]byte, 1); ; {
				if _, err := resp.Body.Read(p); err != nil {
					return
				}
			}
		}()
		s.End(errors.New("enough"))
		<-ended
	}
}

// The flow's limits hold for reading a host's response, also if the host's own request has no limit.
func TestStepsOfAResponseThatDoesNotGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 d0", config.Retry{MaxAttempts: 1},
			func(string, int) response { return replies(200) })
		s := begin(t, f.flow, `{"prompt":"hi"}`, nil)
		step, _, err := s.Next(t.Context())
		require.NoError(t, err)
		_, err = step.Take()
		require.NoError(t, err)
		r, w := io.Pipe() // nobody writes
		defer w.Close()
		step.Done(&http.Response{StatusCode: 200, Body: r, ContentLength: -1}, nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, _, err = s.Next(ctx)
		if !assert.ErrorIs(t, err, pdflow.CodeTimeout) {
			_ = w.Close()
		}
	})
}

// An http.Client may return a response beside an error.
func TestAStepsResponseBesideAnErrorIsClosed(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	s := begin(t, x.flow, `{"prompt":"hi"}`, &x.pair)
	step, _, err := s.Next(context.Background())
	require.NoError(t, err)
	body := &closing{Reader: strings.NewReader(ok)}
	step.Done(&http.Response{StatusCode: 302, Body: body}, errors.New("redirect refused"))
	_, _, err = s.Next(context.Background())
	require.ErrorIs(t, err, pdflow.CodePrefillFailed)
	assert.True(t, body.closed)
}

// Errors of the steps have the shape of the client's API, whatever path the host serves it at.
func TestAStepsErrorKnowsItsAPI(t *testing.T) {
	x := script(t, &fake{}, answer("no JSON"), answer(fromD))
	s, err := x.flow.Begin(context.Background(), &pdflow.Request{API: connector.APIMessages,
		Body: []byte(`{"messages":[{"role":"user","content":"hi"}],"max_tokens":4}`)})
	require.NoError(t, err)
	defer s.End(nil)
	_, _, err = drive(t, s)
	w := httptest.NewRecorder()
	s.WriteError(w, httptest.NewRequest(http.MethodPost, "/anthropic", nil), err)
	assert.Contains(t, w.Body.String(), `"type":"error"`)
}

func panicsAtLegEnd(context.Context, *connector.Session, *pdflow.LegOutcome, *connector.PrefillResult) {
	panic("observer")
}

// An observer that panics at a leg's end leaves no request in flight and no pick open.
func TestAnObserverThatPanicsAtALegsEnd(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD), pdflow.WithObserver(pdflow.Observer{LegEnd: panicsAtLegEnd}))
	done := make(chan struct{})
	x.pair.Done = func(*pdflow.Outcome) { close(done) }
	resp, err := x.flow.Do(context.Background(),
		&pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`), Pick: &x.pair})
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.NotPanics(t, func() { _ = resp.Body.Close() })
	assert.Empty(t, x.flow.Sessions())
	<-done
}

// If the caller's pair cannot serve a request, and the decode engine cannot serve it alone, the request fails.
func TestAGivenPairServesAloneOnlyIfItCan(t *testing.T) {
	x := script(t, &lonely{}, answer(ok), answer(fromD))
	in := &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":["a","b"]}`), Pick: &x.pair}
	_, err := x.flow.Do(context.Background(), in)
	require.ErrorIs(t, err, pdflow.CodeUnsupported)
	assert.Empty(t, x.all())

	in.AnyPair = true
	resp, err := x.flow.Do(context.Background(), in)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, "D", x.all())

	both := x.pair
	both.Decode.Role = discovery.RoleBoth
	in.AnyPair, in.Pick = false, &both
	resp, err = x.flow.Do(context.Background(), in)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
}

// The largest possible limit must work, too.
func TestABodyWithoutALimit(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD), pdflow.WithMaxBody(math.MaxInt64))
	body := io.MultiReader(strings.NewReader(`{"prompt":"hi"}`)) // of unknown length
	resp, err := http.Post(x.url+"/v1/completions", "application/json", body)
	require.NoError(t, err)
	defer resp.Body.Close()
	assert.Equal(t, 200, resp.StatusCode)
}

// firstFails is a round tripper whose first request does not reach the engine.
type firstFails struct {
	legs []pdflow.LegInfo
}

func (f *firstFails) RoundTrip(r *http.Request) (*http.Response, error) {
	info, _ := pdflow.LegFromContext(r.Context())
	if f.legs = append(f.legs, info); len(f.legs) == 1 {
		_ = r.Body.Close()
		return nil, &transport.Error{Sent: transport.SentNothing, Kind: transport.KindRefused,
			Err: errors.New("refused")}
	}
	return client.Transport.RoundTrip(r)
}

// Step.Send sends as Do would: if nothing of a prefill leg was sent, the leg goes to the same engine again, whatever
// its size, and the round tripper can ask which leg it is.
func TestAStepIsSentAsDoWould(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	s := begin(t, x.flow, `{"prompt":"`+strings.Repeat("long ", 2000)+`"}`, &x.pair)
	rt := &firstFails{}
	var resp *pdflow.Response
	for resp == nil {
		var step *pdflow.Step
		var err error
		step, resp, err = s.Next(context.Background())
		require.NoError(t, err)
		if step != nil {
			step.Send(rt)
		}
	}
	require.NoError(t, resp.Body.Close())
	var legs []pdflow.LegKind
	for _, l := range rt.legs {
		legs = append(legs, l.Leg)
	}
	assert.Equal(t, []pdflow.LegKind{pdflow.LegPrefill, pdflow.LegPrefill, pdflow.LegDecode}, legs)
	assert.Equal(t, x.pair.Prefill.ID, rt.legs[0].Endpoint)
	assert.Equal(t, "P D", x.all())
}

func TestDraining(t *testing.T) {
	over := make(chan struct{})
	x := script(t, &fake{}, answer(ok), func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		if !strings.Contains(body, `"stream":true`) { // it came before the drain
			answer(ok)(x, w, r, body)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, streamStart)
		_ = http.NewResponseController(w).Flush()
		select {
		case <-over:
			_, _ = io.WriteString(w, "data: [DONE]\n\n")
		case <-r.Context().Done():
		}
	})
	started := make(chan reply, 1)
	go func() { started <- post(t, x.url, "/v1/completions", completion("a", `"stream":true`)) }()
	require.Eventually(t, func() bool { return len(x.flow.Sessions()) == 1 && x.flow.Sessions()[0].Phase == "stream" },
		20*time.Second, time.Millisecond)
	ended := make(chan error, 1)
	go func() { ended <- x.flow.Shutdown(context.Background()) }()
	require.Eventually(t, func() bool {
		r := post(t, x.url, "/v1/completions", completion("a", ""))
		return r.status == 503 && r.header.Get("Retry-After") != ""
	}, 20*time.Second, time.Millisecond)
	close(over)
	require.NotEmpty(t, (<-started).text(t), "a running stream goes on")
	require.NoError(t, <-ended)
}
