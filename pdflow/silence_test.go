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
