// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
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

// silentEngines are a pair in fake time. D sends an event, is silent for a while, and then sends the rest.
type silentEngines struct {
	silent time.Duration
	health func(ctx context.Context, nth int32) (status int)
	probes atomic.Int32
}

func (e *silentEngines) RoundTrip(r *http.Request) (*http.Response, error) {
	resp := &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, ContentLength: -1, Request: r}
	switch {
	case r.URL.Path == "/health":
		resp.StatusCode = e.health(r.Context(), e.probes.Add(1))
		resp.Body = http.NoBody
		return resp, r.Context().Err()
	case r.URL.Host == "p0":
		resp.Body = io.NopCloser(strings.NewReader(ok))
		return resp, nil
	}
	resp.Header.Set("Content-Type", "text/event-stream")
	out, in := io.Pipe()
	go func() {
		_, _ = io.WriteString(in, `data: {"choices":[{"text":"a"}]}`+"\n\n")
		for range 2 { // the second silence is a new one
			select {
			case <-time.After(e.silent):
				_, _ = io.WriteString(in, `data: {"choices":[{"text":"b"}]}`+"\n\n")
			case <-r.Context().Done():
				_ = in.CloseWithError(r.Context().Err())
				return
			}
		}
		_, _ = io.WriteString(in, "data: [DONE]\n\n")
		_ = in.Close()
	}()
	resp.Body = out
	return resp, nil
}

// A tool parser holds a call's arguments back until they are whole: 32 s for 17,500 characters. Hidden reasoning sends
// nothing for minutes.
func TestAnEngineThatIsWellMayBeSilent(t *testing.T) {
	well := func(context.Context, int32) int { return 200 }
	for name, c := range map[string]struct {
		silent time.Duration
		limits config.Timeouts
		health func(ctx context.Context, nth int32) int
		cut    time.Duration // after the silence began; 0: the stream is whole
		counts string
	}{
		"no longer than idle": {silent: 50 * time.Second, health: well},
		"and well":            {silent: 150 * time.Second, health: well, counts: "well"},
		"without /health": {silent: 90 * time.Second, health: func(context.Context, int32) int { return 404 },
			counts: "well"},
		"dead": {silent: 90 * time.Second, health: func(context.Context, int32) int { return 503 }, cut: time.Minute,
			counts: "ill"},
		"dies in the silence": {silent: 5 * time.Minute, cut: 3 * time.Minute, counts: "well ill",
			health: func(_ context.Context, nth int32) int { return map[bool]int{true: 200, false: 500}[nth < 3] }},
		"frozen": {silent: 90 * time.Second, cut: 62 * time.Second, counts: "ill",
			health: func(ctx context.Context, _ int32) int { <-ctx.Done(); return 200 }},
		"speaks while it is asked": {silent: 61 * time.Second,
			health: func(ctx context.Context, _ int32) int { <-ctx.Done(); return 200 }},
		"a transport that panics": {silent: 90 * time.Second, cut: time.Minute, counts: "ill",
			health: func(context.Context, int32) int { panic("boom") }},
		"for too long": {silent: 11 * time.Minute, health: well, cut: 10 * time.Minute, counts: "well too_long"},
		"without a limit": {silent: time.Hour, health: well, limits: config.Timeouts{Silence: config.None},
			counts: "well"},
		"not at all": {silent: 90 * time.Second, health: well, limits: config.Timeouts{Silence: time.Second},
			cut: time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e, told := &silentEngines{silent: c.silent, health: c.health}, &book{}
				pair := pdflow.Pick{Prefill: endpoint(t, "http://p0", discovery.RolePrefill),
					Decode: endpoint(t, "http://d0", discovery.RoleDecode)}
				flow, err := pdflow.New(&fake{}, always(pair), pdflow.WithTransport(e), metered(told),
					pdflow.WithTimeouts(c.limits), pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
				require.NoError(t, err)
				resp, err := flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions,
					Body: []byte(`{"prompt":"hi","stream":true}`)})
				require.NoError(t, err)
				began := time.Now()
				text, err := io.ReadAll(resp.Body)
				require.NoError(t, resp.Body.Close())
				results := told.labels("pd.silences", "pd.result")
				if c.counts != "" {
					assert.Subset(t, strings.Fields(c.counts), results)
					assert.Subset(t, results, strings.Fields(c.counts))
				} else {
					assert.Empty(t, results)
				}
				if c.cut == 0 {
					require.NoError(t, err)
					assert.Contains(t, string(text), "[DONE]")
				} else {
					require.ErrorIs(t, err, pdflow.CodeTimeout)
					assert.NotContains(t, string(text), "[DONE]")
					assert.Equal(t, c.cut, time.Since(began))
				}
				require.NoError(t, flow.Shutdown(t.Context()))
			})
		})
	}
}

// Streams that fall silent together ask their engine once, and operators see for how long each has been silent. One
// that is closed meanwhile leaves the others their answer.
func TestManySilentStreamsProbeTheirEngineOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &silentEngines{silent: 90 * time.Second, health: func(ctx context.Context, _ int32) int {
			select {
			case <-time.After(time.Second):
				return 200
			case <-ctx.Done():
				return 0
			}
		}}
		flow, err := pdflow.New(&fake{}, always(pdflow.Pick{Prefill: endpoint(t, "http://p0", discovery.RolePrefill),
			Decode: endpoint(t, "http://d0", discovery.RoleDecode)}), pdflow.WithTransport(e))
		require.NoError(t, err)
		var bodies []*pdflow.Body
		ended := make(chan error, 50)
		for range cap(ended) {
			resp, err := flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions,
				Body: []byte(`{"prompt":"hi","stream":true}`)})
			require.NoError(t, err)
			bodies = append(bodies, resp.Body)
			go func() {
				_, err := io.ReadAll(resp.Body)
				ended <- err
			}()
		}
		time.Sleep(59 * time.Second)
		for _, s := range flow.Sessions() {
			assert.Zero(t, s.Silent)
		}
		time.Sleep(time.Second + 500*time.Millisecond) // the probe is under way
		assert.Equal(t, int32(1), e.probes.Load())
		left := 0
		for _, b := range bodies[:cap(ended)/2] { // whose probe it is may be among them
			require.NoError(t, b.Close())
			left++
		}
		time.Sleep(5 * time.Second)
		assert.LessOrEqual(t, e.probes.Load(), 1+int32(left), "one more for each that left in its own")
		for _, s := range flow.Sessions() {
			assert.InDelta(t, 65*time.Second, s.Silent, float64(2*time.Second))
		}
		for range cap(ended) {
			if err := <-ended; err != nil {
				left--
				assert.NotErrorIs(t, err, pdflow.CodeTimeout)
			}
		}
		assert.Zero(t, left)
		for _, b := range bodies {
			require.NoError(t, b.Close())
		}
		require.NoError(t, flow.Shutdown(t.Context()))
	})
}

// What a health checker has seen within the last seconds is asked first, and so is what the picker knows: an engine
// whose scheduler stands still answers its probes all the same.
func TestASilentEngineIsProbedOnlyIfNothingIsKnownOfIt(t *testing.T) {
	for name, c := range map[string]struct {
		know   func(set *discovery.Set, picker pdflow.Picker, at time.Duration)
		cut    bool
		probes int32
	}{
		"nothing": {func(*discovery.Set, pdflow.Picker, time.Duration) {}, false, 2}, // in two silences
		"well": {func(s *discovery.Set, _ pdflow.Picker, _ time.Duration) { s.SetHealthy("d0", true) },
			false, 0},
		"ill": {func(s *discovery.Set, _ pdflow.Picker, at time.Duration) { s.SetHealthy("d0", at == 0) }, true, 0},
		"long ago": {func(s *discovery.Set, _ pdflow.Picker, at time.Duration) {
			if at < 40*time.Second {
				s.SetHealthy("d0", at == 0)
			}
		}, false, 2},
		"requests run out of time there": {func(s *discovery.Set, p pdflow.Picker, at time.Duration) {
			s.SetHealthy("d0", true)
			if at == 50*time.Second {
				for _, prompt := range []string{"a", "b"} {
					outOfTime(t, p, prompt)
				}
			}
		}, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &silentEngines{silent: 90 * time.Second, health: func(context.Context, int32) int { return 200 }}
				set := setOf(t, named(t, "p0"), named(t, "d0"), named(t, "d1"))
				picker := pick.New(set, pick.RoundRobin())
				flow, err := pdflow.New(&fake{}, picker, pdflow.WithTransport(e),
					pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
				require.NoError(t, err)
				known := make(chan struct{})
				ctx, stop := context.WithCancel(t.Context())
				go func() {
					defer close(known)
					for at := time.Duration(0); ctx.Err() == nil; at += 5 * time.Second {
						c.know(set, picker, at)
						time.Sleep(5 * time.Second)
					}
				}()
				resp, err := flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Decode: "d0",
					Body: []byte(`{"prompt":"hi","stream":true}`)})
				require.NoError(t, err)
				_, err = io.ReadAll(resp.Body)
				require.NoError(t, resp.Body.Close())
				if c.cut {
					require.ErrorIs(t, err, pdflow.CodeTimeout)
				} else {
					require.NoError(t, err)
				}
				assert.Equal(t, c.probes, e.probes.Load())
				stop()
				<-known
				require.NoError(t, flow.Shutdown(t.Context()))
			})
		})
	}
}

// named is an engine whose ID is its host, p… or d….
func named(t *testing.T, name string) discovery.Endpoint {
	t.Helper()
	role := discovery.RolePrefill
	if name[0] == 'd' {
		role = discovery.RoleDecode
	}
	e := endpoint(t, "http://"+name, role)
	e.ID = name
	return e
}

// outOfTime tells a picker that a request ran out of time at d0.
func outOfTime(t *testing.T, p pdflow.Picker, prompt string) {
	t.Helper()
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"`+prompt+`"}`))
	require.NoError(t, err)
	choice, err := p.Pick(t.Context(), &pdflow.PickInput{Request: r, Attempt: 1, Decode: "d0"})
	require.NoError(t, err)
	s := &connector.Session{Request: r, Prefill: choice.Prefill, Decode: choice.Decode, CreatedAt: time.Now()}
	choice.Done(&pdflow.Outcome{Session: s, Decode: pdflow.LegOutcome{Leg: pdflow.LegDecode, Endpoint: "d0"},
		Err: &pdflow.Error{Code: pdflow.CodeTimeout, Leg: pdflow.LegDecode, Endpoint: "d0"}})
}

// A host that sends the legs by itself has the same watchdog. It has no hand free for a probe while it reads the
// response: that goes out by the flow's own transport.
func TestStreamsOfStepsMayBeSilent(t *testing.T) {
	for name, c := range map[string]struct {
		silent time.Duration
		status int
		cut    time.Duration // after the silence began; 0: the stream is whole
	}{
		"well":         {90 * time.Second, 200, 0},
		"ill":          {90 * time.Second, 503, time.Minute},
		"for too long": {11 * time.Minute, 200, 10 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &silentEngines{silent: c.silent, health: func(context.Context, int32) int { return c.status }}
				var sent atomic.Int32
				flow, err := pdflow.New(&fake{}, always(pdflow.Pick{
					Prefill: endpoint(t, "http://p0", discovery.RolePrefill),
					Decode:  endpoint(t, "http://d0", discovery.RoleDecode)}), pdflow.WithTransport(e))
				require.NoError(t, err)
				steps, err := flow.Begin(t.Context(), &pdflow.Request{API: connector.APICompletions,
					Body: []byte(`{"prompt":"hi","stream":true}`)})
				require.NoError(t, err)
				for {
					step, resp, err := steps.Next(t.Context())
					require.NoError(t, err)
					if step != nil {
						sent.Add(1)
						step.Send(e)
						continue
					}
					began := time.Now()
					text, err := io.ReadAll(resp.Body)
					if c.cut == 0 {
						require.NoError(t, err)
						assert.Contains(t, string(text), "[DONE]")
					} else {
						require.ErrorIs(t, err, pdflow.CodeTimeout)
						assert.Equal(t, c.cut, time.Since(began))
					}
					break
				}
				steps.End(nil)
				assert.Equal(t, int32(2), sent.Load(), "no probe is the host's to send")
				assert.Positive(t, e.probes.Load())
				require.NoError(t, flow.Shutdown(t.Context()))
			})
		})
	}
}
