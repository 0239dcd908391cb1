// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"io"
	"net/http"
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
	"github.com/pdkit/pdkit/transport"
)

// told is a picker of one pair that records the calls it gets, in order.
type told struct {
	pick pdflow.Pick
	mu   sync.Mutex
	of   []string
	last *pdflow.Outcome
}

func (p *told) Pick(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	x := p.pick
	x.PrefillDone = func(*pdflow.LegOutcome) { p.note("prefill", nil) }
	x.Done = func(o *pdflow.Outcome) { p.note("all", o) }
	return x, nil
}

func (p *told) note(what string, o *pdflow.Outcome) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.of, p.last = append(p.of, what), o
}

// says is an engine that answers all requests alike.
func says(code int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
}

func TestThePickersRanksAreTheSessionsAndItHearsOfEachEnd(t *testing.T) {
	for name, c := range map[string]struct {
		order connector.Order
		p     http.HandlerFunc
		alone bool
		want  []string
	}{
		"one after the other": {connector.PrefillThenDecode, says(200, ok), false, []string{"prefill", "all"}},
		"side by side":        {connector.Together, says(200, ok), false, []string{"prefill", "all"}},
		"prefill refuses":     {connector.PrefillThenDecode, says(400, `{}`), false, []string{"prefill", "all"}},
		"one engine":          {connector.PrefillThenDecode, says(200, ok), true, []string{"all"}},
	} {
		t.Run(name, func(t *testing.T) {
			ep := func(role discovery.Role, h http.HandlerFunc) discovery.Endpoint {
				e := endpoint(t, serve(t, h), role)
				e.Attributes = map[string]string{"dpSize": "8"}
				return e
			}
			picker := &told{
				pick: pdflow.Pick{Decode: ep(discovery.RoleDecode, says(200, ok)), PrefillRank: discovery.RankOf(5),
					DecodeRank: discovery.RankOf(3)},
			}
			if !c.alone {
				picker.pick.Prefill = ep(discovery.RolePrefill, c.p)
			}
			tr := transport.New(&transport.Options{NetHTTP: netHTTP})
			t.Cleanup(func() { tr.Close() })
			flow, err := pdflow.New(&fake{order: c.order}, pick.Func(picker.Pick), pdflow.WithTransport(tr),
				pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
			require.NoError(t, err)
			post(t, serve(t, flow), "/v1/completions", completion("a", ""))
			require.Eventually(t, func() bool {
				picker.mu.Lock()
				defer picker.mu.Unlock()
				return picker.last != nil
			}, 20*time.Second, time.Millisecond)
			require.Equal(t, c.want, picker.of)
			if !c.alone {
				require.Equal(t, 5, picker.last.Session.PrefillRank)
			}
			require.Equal(t, 3, picker.last.Session.DecodeRank)
		})
	}
}

// noDecode names no decode engine.
func noDecode(ctx context.Context, inner pdflow.Picker, in *pdflow.PickInput) (pdflow.Pick, error) {
	chosen, err := inner.Pick(ctx, in)
	chosen.Decode = discovery.Endpoint{}
	return chosen, err
}

func TestAPickThatIsRefusedIsGivenBack(t *testing.T) {
	p, d := endpoint(t, "http://p", discovery.RolePrefill), endpoint(t, "http://d", discovery.RoleDecode)
	picker := &openPicks{}
	flow, err := pdflow.New(&fake{}, around{around{pick.New(setOf(t, p, d), pick.RoundRobin()), picker.pick}, noDecode})
	require.NoError(t, err)
	_, err = flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`)})
	require.ErrorIs(t, err, pdflow.CodeInternal)
	require.Zero(t, picker.open.Load())
	require.NoError(t, flow.Shutdown(t.Context()))
}

// A picker that names a prefill engine although one engine is to serve is taken at half its word.
func TestOneEngineServesWhateverThePickerNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pair := pdflow.Pick{Prefill: endpoint(t, "http://p0", discovery.RolePrefill),
			PrefillRank: discovery.RankOf(5),
			Encode:      []discovery.Endpoint{endpoint(t, "http://e0", discovery.RoleEncode)}}
		pair.Decode = endpoint(t, "http://d0", discovery.RoleDecode)
		pair.Prefill.Attributes = map[string]string{"dpSize": "8"}
		engines, seen := inMemory(t, 0), &outcomes{}
		engines.answer = func(host string, _ int) response {
			return replies(map[string]int{"p0": http.StatusInternalServerError, "d0": http.StatusOK}[host])
		}
		flow, err := pdflow.New(&fake{}, always(pair), pdflow.WithTransport(engines),
			pdflow.WithRetry(config.Retry{MaxAttempts: 1}), pdflow.WithFallback(config.FallbackDecode),
			pdflow.WithObserver(pdflow.Observer{SessionEnd: seen.SessionEnd}))
		require.NoError(t, err)
		engines.flow, flow = flow, engines.flow
		require.NoError(t, engines.do(completion("a", "")))
		assert.Equal(t, "p0 d0", engines.hosts())
		both, alone := seen.list()[0].Session, seen.list()[1].Session
		assert.Equal(t, 5, both.PrefillRank)
		assert.Zero(t, alone.PrefillRank)
		assert.Empty(t, alone.Encode)
		require.NoError(t, engines.flow.Shutdown(t.Context()))
		engines.flow = flow
	})
}
