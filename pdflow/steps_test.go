// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
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
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// drive sends a request's legs as a host would, each in a goroutine of its own, and returns the response. The legs'
// kinds are in the order in which they came.
func drive(t *testing.T, s *pdflow.Steps) (legs []string, resp *pdflow.Response, err error) {
	t.Helper()
	return driveOver(t, s, client.Transport)
}

// driveOver is drive over a transport of the test's.
func driveOver(t *testing.T, s *pdflow.Steps, rt http.RoundTripper) (legs []string, resp *pdflow.Response, err error) {
	t.Helper()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		step, resp, err := s.Next(context.Background())
		if step == nil {
			return legs, resp, err
		}
		legs = append(legs, string(step.Leg))
		wg.Go(func() {
			req, err := step.Take()
			if err != nil {
				step.Done(nil, err)
				return
			}
			step.Done(rt.RoundTrip(req))
		})
	}
}

func begin(t *testing.T, f *pdflow.Flow, body string, given *pdflow.Pick) *pdflow.Steps {
	t.Helper()
	s, err := f.Begin(
		context.Background(), &pdflow.Request{API: connector.APICompletions, Body: []byte(body), Pick: given},
	)
	require.NoError(t, err)
	t.Cleanup(func() { s.End(nil) })
	return s
}

const fromD = `{"choices":[{"text":"from D"}]}`

// With each order, a host that sends the legs itself gets the same legs, response and outcome as Do.
func TestStepsRunEveryOrder(t *testing.T) {
	side := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "x") }))
	asks := newAsking(connector.DecodeThenPrefill)
	for name, c := range map[string]struct {
		conn connector.KVConnector
		want []string
	}{
		"prefill then decode":  {&fake{order: connector.PrefillThenDecode}, []string{"prefill", "decode"}},
		"together":             {&fake{order: connector.Together}, []string{"prefill", "decode"}},
		"decode first, warm":   {&cold{fake{order: connector.DecodeFirst}}, []string{"decode"}},
		"decode, then prefill": {asks, []string{"decode", "prefill"}},
		"a side call":          {&preparing{url: side}, []string{"", "prefill", "decode"}},
	} {
		t.Run(name, func(t *testing.T) {
			prefilled := make(chan struct{})
			x := script(t, c.conn, func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
				close(prefilled)
				answer(ok)(x, w, r, b)
			}, func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
				if c.conn == asks {
					asks.event <- connector.Event{}
					<-prefilled
				}
				answer(fromD)(x, w, r, b)
			})
			s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
			legs, resp, err := drive(t, s)
			require.NoError(t, err)
			body, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			assert.JSONEq(t, fromD, string(body))
			s.End(nil)
			assert.Equal(t, c.want, legs)
			require.Len(t, x.seen.list(), 1)
			assert.NoError(t, errorOf(x.seen.list()[0].Err))
		})
	}
}

func errorOf(e *pdflow.Error) error {
	if e == nil {
		return nil
	}
	return e
}

// If an attempt fails, Next returns the prefill leg of the next attempt, which Do would send itself.
func TestStepsRetryAtAnotherPair(t *testing.T) {
	tries := 0
	first := func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		if tries++; tries == 1 {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		_, _ = io.WriteString(w, ok)
	}
	x := script(t, &fake{}, first, answer(fromD),
		pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: time.Millisecond}))
	s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
	legs, resp, err := drive(t, s)
	require.NoError(t, err)
	_, _ = io.Copy(io.Discard, resp.Body)
	s.End(nil)
	assert.Equal(t, []string{"prefill", "prefill", "decode"}, legs)
	require.Len(t, x.seen.list(), 2)
	assert.Equal(t, pdflow.CodePrefillFailed, x.seen.list()[0].Err.Code)
}

// A step can be taken once: engines answer 200 with another prompt's text to a handoff that is used twice. The second
// Take gets an error, and a Send ends the request.
func TestAStepIsTakenOnce(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD))
	s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
	step, _, err := s.Next(context.Background())
	require.NoError(t, err)
	body, err := taken(step)
	require.NoError(t, err)
	assert.Contains(t, string(body), `"prompt":"hi"`)
	_, err = step.Take()
	require.Error(t, err)
	assert.ErrorIs(t, err, pdflow.CodeInvalid)
	step.Send(client.Transport) // gives the error as the step's result
	_, _, err = s.Next(context.Background())
	require.Error(t, err)
}

// If the host takes a decode leg after its handoff has become too old, the flow refuses the leg, and the attempt fails.
func TestADecodeLegIsNotGivenOutAfterItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := inMemory(t, 0, pdflow.WithTimeouts(config.Timeouts{Handoff: time.Second}))
		s := begin(t, f.flow, `{"prompt":"hi"}`, nil)
		step, _, err := s.Next(t.Context())
		require.NoError(t, err)
		req, err := step.Take()
		require.NoError(t, err)
		step.Done(f.RoundTrip(req))
		step, _, err = s.Next(t.Context())
		require.NoError(t, err)
		require.Equal(t, pdflow.LegDecode, step.Leg)
		assert.Equal(t, time.Second, time.Until(step.Expires))
		time.Sleep(time.Until(step.Expires) + 10*time.Millisecond)
		_, err = step.Take()
		require.ErrorIs(t, err, pdflow.CodeHandoffExpired)
		_, _, err = s.Next(t.Context())
		require.ErrorIs(t, err, pdflow.CodeHandoffExpired)
		assert.Equal(t, "p0", f.hosts())
	})
}

// A host such as Envoy passes decode's response on by itself. It tells the flow the response's status and its end.
func TestARelayedResponse(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		end    error
		want   pdflow.Code
	}{
		"whole":        {200, nil, ""},
		"client left":  {200, context.Canceled, pdflow.CodeClientGone},
		"broken":       {200, errors.New("reset"), pdflow.CodeStreamBroken},
		"refused by D": {400, nil, pdflow.CodeDecodeRejected},
		"failed at D":  {500, nil, pdflow.CodeDecodeFailed},
		"partial":      {206, nil, pdflow.CodeDecodeFailed},
	} {
		t.Run(name, func(t *testing.T) {
			done := 0
			x := script(t, &fake{}, answer(ok), answer(fromD))
			pair := x.pair
			pair.Done = func(*pdflow.Outcome) { done++ }
			s := begin(t, x.flow, `{"prompt":"hi"}`, &pair)
			step, _, err := s.Next(context.Background())
			require.NoError(t, err)
			require.ErrorIs(t, step.Relay(200), pdflow.CodeUnsupported, "P's response is the flow's to read")
			req, err := step.Take()
			require.NoError(t, err)
			step.Done(client.Transport.RoundTrip(req))
			step, _, err = s.Next(context.Background())
			require.NoError(t, err)
			_, err = step.Take()
			require.NoError(t, err)
			require.NoError(t, step.Relay(c.status))
			step, resp, err := s.Next(context.Background())
			require.NoError(t, err)
			assert.Nil(t, step)
			assert.Nil(t, resp.Body)
			assert.Equal(t, pdflow.ModeDisaggregated, resp.Mode)
			s.End(c.end)
			s.End(nil)
			assert.Equal(t, 1, done, "Done is called exactly once")
			require.Len(t, x.seen.list(), 1)
			assert.Equal(t, c.want, codeOf(x.seen.list()[0].Err))
		})
	}
}

// Relay waits for the prefill leg that runs at the same time. If that one fails, decode's status 200 is no success.
func TestARelayedResponseWaitsForPrefill(t *testing.T) {
	for name, c := range map[string]struct {
		body string
		want pdflow.Code
	}{"prefill succeeds": {ok, ""}, "prefill fails": {"no JSON", pdflow.CodePrefillFailed}} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{order: connector.Together}, answer(c.body), answer(fromD))
			s := begin(t, x.flow, `{"prompt":"hi"}`, &x.pair)
			prefill, _, err := s.Next(context.Background())
			require.NoError(t, err)
			decode, _, err := s.Next(context.Background())
			require.NoError(t, err)
			_, err = decode.Take()
			require.NoError(t, err)
			require.NoError(t, decode.Relay(200))
			soon, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			_, _, err = s.Next(soon)
			require.ErrorIs(t, err, context.DeadlineExceeded, "prefill still runs")
			req, err := prefill.Take()
			require.NoError(t, err)
			prefill.Done(client.Transport.RoundTrip(req))
			_, resp, err := s.Next(context.Background())
			if c.want != "" {
				assert.Equal(t, c.want, codeOf(err))
				return
			}
			require.NoError(t, err)
			assert.Nil(t, resp.Body)
		})
	}
}

// WriteError gives the client what ServeHTTP would.
func TestAStepsErrorIsWrittenAsServeHTTPDoes(t *testing.T) {
	handler := func(w http.ResponseWriter, r *http.Request, e *pdflow.Error) {
		w.Header().Set("X-Own", "1")
		e.Send(w, r)
	}
	x := script(t, &fake{}, answer("no JSON"), answer(fromD), pdflow.WithErrorHandler(handler))
	r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":"hi"}`))
	r.Header = http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {"mine"}}
	want, got := httptest.NewRecorder(), httptest.NewRecorder()
	x.flow.ServeHTTP(want, r)
	in := &pdflow.Request{API: connector.APICompletions, Header: r.Header, Body: []byte(`{"prompt":"hi"}`)}
	s, err := x.flow.Begin(context.Background(), in)
	require.NoError(t, err)
	defer s.End(nil)
	_, _, err = drive(t, s)
	s.WriteError(got, r, err)
	assert.Equal(t, 502, got.Code)
	assert.Equal(t, "mine", got.Header().Get("X-Request-Id"))
	assert.Equal(t, want.Header(), got.Header())
	assert.Equal(t, want.Body.String(), got.Body.String())
}

// If the connector changes decode's response, the host must not relay it past the flow.
func TestAResponseThatTheConnectorChangesIsNotRelayed(t *testing.T) {
	x := script(t, &rewriting{fake: fake{}}, answer(ok), answer(fromD))
	s := begin(t, x.flow, `{"prompt":"hi","logprobs":1}`, nil)
	step, _, err := s.Next(context.Background())
	require.NoError(t, err)
	req, _ := step.Take()
	step.Done(client.Transport.RoundTrip(req))
	step, _, err = s.Next(context.Background())
	require.NoError(t, err)
	assert.False(t, step.Relayable())
	require.ErrorIs(t, step.Relay(200), pdflow.CodeUnsupported)
}

// If a host forgets to end a request, the flow ends it after a limit, counts it by its code and logs it.
func TestAForgottenRequestIsEnded(t *testing.T) {
	for name, upTo := range map[string]int{"before the first leg": 0, "with a leg in hand": 1,
		"with a response in hand": 2} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var logged bytes.Buffer
				f := inMemory(t, 0, pdflow.WithTimeouts(config.Timeouts{Steps: 100 * time.Millisecond}),
					logsTo(slog.New(slog.NewTextHandler(&logged, nil))))
				s, err := f.flow.Begin(context.Background(),
					&pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`)})
				require.NoError(t, err)
				switch upTo {
				case 1:
					_, _, err = s.Next(context.Background())
					require.NoError(t, err)
				case 2:
					_, _, err = driveOver(t, s, f)
					require.NoError(t, err)
				}
				time.Sleep(101 * time.Millisecond)
				synctest.Wait()
				require.Empty(t, f.flow.Sessions())
				require.Len(t, f.seen.list(), 1)
				assert.Equal(t, pdflow.CodeForgotten, f.seen.list()[0].Err.Code)
				assert.Contains(t, logged.String(), "forgotten")
				if upTo == 2 {
					return
				}
				_, _, err = s.Next(context.Background())
				require.ErrorIs(t, err, pdflow.CodeForgotten)
			})
		})
	}
}

// End before the response cancels the legs that run. The flow closes a response that comes after that.
func TestEndingBeforeTheResponse(t *testing.T) {
	x := script(t, &fake{}, gone, answer(fromD))
	s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
	step, _, err := s.Next(context.Background())
	require.NoError(t, err)
	s.End(nil)
	assert.Error(t, step.Context().Err())
	late := &closing{Reader: strings.NewReader(ok)}
	step.Done(&http.Response{StatusCode: 200, Body: late}, nil)
	assert.True(t, late.closed)
	assert.Equal(t, pdflow.CodeClientGone, x.seen.list()[0].Err.Code)
	_, err = step.Take()
	require.Error(t, err)
}

type closing struct {
	io.Reader
	closed bool
}

func (c *closing) Close() error { c.closed = true; return nil }

// Side calls of a clean-up after End fail at once, since nobody sends them.
func TestCleaningUpAfterEndDoesNotWait(t *testing.T) {
	asked := make(chan error, 1)
	c := &callingCleaner{asked: asked}
	x := script(t, c, answer(ok), answer(fromD))
	s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
	_, _, err := s.Next(context.Background())
	require.NoError(t, err)
	begun := time.Now()
	s.End(nil)
	require.Error(t, <-asked)
	assert.Less(t, time.Since(begun), 4*time.Second)
}

type callingCleaner struct {
	fake
	asked chan error
}

func (c *callingCleaner) Clean(ctx context.Context, s *connector.Session, _ error, call connector.Caller) error {
	r, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.Prefill.URL.String()+"/free", http.NoBody)
	resp, err := call(r)
	if err == nil {
		_ = resp.Body.Close()
	}
	c.asked <- err
	return err
}

// An encode stage's legs come as steps, too.
func TestStepsOfAnEncodeStage(t *testing.T) {
	c := &encoding{}
	x := script(t, c, answer(ok), answer(fromD))
	pair := x.pair
	pair.Encode = []discovery.Endpoint{endpoint(t, x.pair.Prefill.URL.String(), discovery.RoleEncode)}
	pair.Encode[0].ID = "encoder"
	s := begin(t, x.flow, `{"prompt":"hi"}`, &pair)
	step, _, err := s.Next(t.Context())
	require.NoError(t, err)
	assert.Equal(t, pdflow.LegEncode, step.Leg)
	assert.Equal(t, "encoder", step.Endpoint.ID)
	step.Send(client.Transport)
	legs, resp, err := drive(t, s)
	require.NoError(t, err)
	_, _ = io.Copy(io.Discard, resp.Body)
	assert.Equal(t, []string{"encode", "prefill", "decode"}, legs)
}

// What a host sends is what Do would have sent, byte for byte.
func TestStepsSendWhatDoSends(t *testing.T) {
	bodies := map[string]map[string]string{"do": {}, "steps": {}}
	mode := "do"
	engine := func(name, response string) handler {
		return func(_ *scripted, w http.ResponseWriter, r *http.Request, body string) {
			r.Header.Del("X-Request-Id")
			r.Header.Del("Connection") // this host keeps none
			head, _ := json.Marshal(r.Header)
			bodies[mode][name] = r.Method + r.URL.Path + body + string(head)
			_, _ = io.WriteString(w, response)
		}
	}
	x := script(t, &fake{}, engine("P", ok), engine("D", fromD))
	in := &pdflow.Request{API: connector.APICompletions,
		Body:   []byte(`{"prompt":"hi","max_tokens":7,"kv_transfer_params":{}}`),
		Header: http.Header{"Authorization": {"Bearer x"}, "Cookie": {"no"}}}
	resp, err := x.flow.Do(context.Background(), in)
	require.NoError(t, err)
	_, _ = io.Copy(io.Discard, resp.Body)
	require.NoError(t, resp.Body.Close())
	mode = "steps"
	s, err := x.flow.Begin(context.Background(), in)
	require.NoError(t, err)
	defer s.End(nil)
	_, resp, err = drive(t, s)
	require.NoError(t, err)
	_, _ = io.Copy(io.Discard, resp.Body)
	assert.Len(t, bodies["do"], 2)
	for name, sent := range bodies["do"] {
		assert.Equal(t, sent, bodies["steps"][name], name)
	}
}

// The limit for forgotten requests does not run while the host waits for an engine.
func TestWaitingIsNotForgetting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := inMemory(t, 300*time.Millisecond, pdflow.WithTimeouts(config.Timeouts{Steps: 50 * time.Millisecond}))
		_, resp, err := driveOver(t, begin(t, f.flow, `{"prompt":"hi"}`, nil), f)
		require.NoError(t, err)
		_, err = io.ReadAll(resp.Body)
		require.NoError(t, err)
	})
}

// A connector whose Start panics fails the request, in a goroutine of the flow's own, too.
func TestAStartThatPanicsIsTheRequestsFailure(t *testing.T) {
	flow, err := pdflow.New(&panicStarter{}, pick.New(setOf(t), pick.RoundRobin()))
	require.NoError(t, err)
	s := begin(t, flow, `{"prompt":"hi"}`, nil)
	_, _, err = s.Next(context.Background())
	require.ErrorIs(t, err, pdflow.CodeInternal)
}

type panicStarter struct{ fake }

func (*panicStarter) Start(context.Context) error { panic("no port") }
