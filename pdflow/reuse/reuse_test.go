// SPDX-License-Identifier: Apache-2.0

package reuse_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/lmcachepd"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/connector/trtllm"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is two engines and a flow over them.
type pair struct {
	p, d *enginesim.Engine
	flow *pdflow.Flow
}

func start(t *testing.T, c connector.KVConnector, prefill, decode enginesim.Config, opts ...pdflow.Option) pair {
	t.Helper()
	p, d, err := enginesim.Pair(prefill, decode)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	var eps []discovery.Endpoint
	for url, role := range map[string]discovery.Role{p.URL(): discovery.RolePrefill, d.URL(): discovery.RoleDecode} {
		e, err := discovery.New(url, role)
		require.NoError(t, err)
		eps = append(eps, e)
	}
	return pair{p, d, over(t, c, eps[0], eps[1], opts...)}
}

// over is a flow over two engines.
func over(t *testing.T, c connector.KVConnector, one, other discovery.Endpoint, opts ...pdflow.Option) *pdflow.Flow {
	t.Helper()
	set, err := static.NewSet(one, other)
	require.NoError(t, err)
	flow, err := pdflow.New(c, pick.New(set, pick.RoundRobin()), opts...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = flow.Shutdown(ctx)
	})
	return flow
}

func (x pair) target(c connector.KVConnector) reuse.Target {
	return reuse.Target{Ask: reuse.Flow(x.flow, nil), Connector: c, Prefill: []string{x.p.URL() + "/"},
		Decode: []string{x.d.URL()}, Model: "tiny"}
}

// verified verifies a target that can be judged.
func verified(t *testing.T, target reuse.Target, o reuse.Options) *reuse.Report {
	t.Helper()
	r, err := reuse.Verify(t.Context(), target, o)
	require.NoError(t, err)
	return r
}

func conn[C connector.KVConnector](c C, err error) connector.KVConnector {
	if err != nil {
		panic(err)
	}
	return c
}

func TestReuseIsProvenByTheEnginesCounters(t *testing.T) {
	c := conn(nixl.New(nil))
	x := start(t, c, enginesim.Config{}, enginesim.Config{})
	r := verified(t, x.target(c), reuse.Options{})
	require.Equal(t, reuse.Reused, r.Verdict, "%s", r)
	require.Len(t, r.Probes, 3)
	require.Equal(t, r.PromptTokens, r.Reused)
	require.InDelta(t, 1800, r.PromptTokens, 60)
	require.Equal(t, x.d.Stats().BytesTransferred, r.Bytes)
	require.Equal(t, 3, r.Compared)
	require.Zero(t, r.Different)
	require.Empty(t, r.Reasons)
	require.Contains(t, r.String(), "nixl: reused, ")
}

func TestAGatewayIsAskedOverHTTP(t *testing.T) {
	c := conn(nixl.New(nil))
	x := start(t, c, enginesim.Config{}, enginesim.Config{})
	var keys atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "Bearer k" {
			keys.Add(1)
		}
		x.flow.ServeHTTP(w, r)
	}))
	defer s.Close()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	target := x.target(c)
	target.Ask = reuse.Gateway(s.URL+"/", client, http.Header{"Authorization": {"Bearer k"}})
	r := verified(t, target, reuse.Options{Probes: 2})
	require.Equal(t, reuse.Reused, r.Verdict, "%s", r)
	require.Equal(t, "disaggregated", r.Probes[0].Mode)
	require.EqualValues(t, 2, keys.Load())
}

func TestAWrongTextIsFoundOut(t *testing.T) {
	c := conn(nixl.New(nil))
	x := start(t, c, enginesim.Config{}, enginesim.Config{})
	ask := reuse.Flow(x.flow, nil)
	target := x.target(c)
	target.Ask = func(ctx context.Context, body []byte) (int, string, []byte, error) {
		status, mode, response, err := ask(ctx, body)
		return status, mode, []byte(strings.Replace(string(response), `"text":"`, `"text":"x`, 1)), err
	}
	r := verified(t, target, reuse.Options{Probes: 2})
	require.Equal(t, reuse.Wrong, r.Verdict, "%s", r)
	require.Equal(t, 2, r.Different)
}

// What Verify says of pairs that do not do what they should, and the reason that it gives.
func TestWhatIsBrokenIsNamed(t *testing.T) {
	mutated := func(mutate func(m map[string]any)) enginesim.Fault {
		return enginesim.Fault{Kind: enginesim.FaultMutateHandoff, Leg: enginesim.LegPrefill, Mutate: mutate}
	}
	noHost := mutated(func(m map[string]any) { delete(m, "remote_host") })
	once := pdflow.WithRetry(config.Retry{MaxAttempts: 1})
	for name, c := range map[string]struct {
		conn     connector.KVConnector // nil: nixl
		decode   enginesim.Config
		ofP, ofD enginesim.Fault
		opt      pdflow.Option
		verdict  reuse.Verdict
		says     string
	}{
		"right responses without reuse": {conn: conn(plainhttp.New(nil)), opt: once, verdict: reuse.NotReused,
			says: "connector http relays nothing"},
		"a decode engine without a connector": {decode: enginesim.Config{Connector: "none"}, opt: once,
			verdict: reuse.NotReused, says: "never asked its KV connector"},
		"no handoff": {ofP: noHost, opt: once, verdict: reuse.Failed, says: "no usable KV handoff"},
		"P fails": {ofP: enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Leg: enginesim.LegPrefill},
			opt: once, verdict: reuse.Failed, says: "the prefill engine failed"},
		"P answers junk": {ofP: enginesim.Fault{Kind: enginesim.FaultGarbage, Leg: enginesim.LegPrefill}, opt: once,
			verdict: reuse.Failed, says: "the prefill engine failed"},
		"a fallback": {ofP: noHost, opt: pdflow.WithFallback(config.FallbackDecode), verdict: reuse.NotReused,
			says: "X-PD-Mode: fallback"},
		"a load that fails in silence": {decode: enginesim.Config{LoadFailure: enginesim.LoadFailureRecompute},
			ofD: enginesim.Fault{Kind: enginesim.FaultLoadFailure, Leg: enginesim.LegDecode}, opt: once,
			verdict: reuse.NotReused, says: "failed transfers"},
		// The counters alone show nothing.
		"wrong KV": {ofP: mutated(func(m map[string]any) { slices.Reverse(m["remote_block_ids"].([]any)[0].([]any)) }),
			opt: once, verdict: reuse.Wrong, says: "decode read KV that is not the prompt's"},
	} {
		t.Run(name, func(t *testing.T) {
			k := c.conn
			if k == nil {
				k = conn(nixl.New(nil))
			}
			x := start(t, k, enginesim.Config{}, c.decode, c.opt)
			for e, fault := range map[*enginesim.Engine]enginesim.Fault{x.p: c.ofP, x.d: c.ofD} {
				if fault.Kind != 0 {
					fault.Count = -1
					e.Inject(fault)
				}
			}
			r := verified(t, x.target(k), reuse.Options{Probes: 1})
			require.Equal(t, c.verdict, r.Verdict, "%s", r)
			require.Contains(t, r.String(), c.says)
			require.Equal(t, c.verdict == reuse.Wrong, r.Different > 0, "all other texts are right")
			if c.verdict == reuse.NotReused {
				require.Zero(t, r.Reused)
			}
			if c.verdict == reuse.Wrong {
				// D keeps KV that it took over in its own prefix cache, so that the right text can only come from a
				// request which that cache does not serve.
				require.Equal(t, r.PromptTokens, r.Reused)
				asked := x.d.Requests()
				require.Contains(t, string(asked[len(asked)-1].Body), `"cache_salt":"pdkit-`)
			}
		})
	}
}

// As LMCache's sender ends by a request without disagg_spec. The engine may be gone at once, or while the next
// synthetic probe begins.
func TestAnEngineThatASyntheticProbeEndsIsJudged(t *testing.T) {
	k := conn(nixl.New(nil))
	for _, gone := range []int{1, 2} { // after how many failed probes
		port, err := freeport.One()
		require.NoError(t, err)
		x := start(t, k, enginesim.Config{Listen: "127.0.0.1:" + port}, enginesim.Config{})
		target, asked := x.target(k), 0
		target.Ask = func(context.Context, []byte) (int, string, []byte, error) {
			if asked++; asked == gone {
				require.NoError(t, x.p.Close())
			}
			return http.StatusBadGateway, "", []byte(`{"error":{"code":"prefill_failed"}}`), nil
		}
		r := verified(t, target, reuse.Options{Probes: 3})
		require.Equal(t, reuse.Failed, r.Verdict, "%s", r)
		require.Contains(t, r.String(), "the prefill engine failed")
		require.Len(t, r.Probes, gone)
	}
}

func TestWhatCannotBeJudgedIsAnError(t *testing.T) {
	k := conn(nixl.New(nil))
	x := start(t, k, enginesim.Config{}, enginesim.Config{})
	target := x.target(k)
	for page, described := range map[string]connector.KVConnector{"up 1\n": k, "up 2\n": conn(trtllm.New(nil)),
		"{}": conn(trtllm.New(nil))} { // without counters, and without records
		blind := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte(page))
		}))
		target.Decode, target.Connector = []string{blind.URL}, described
		_, err := reuse.Verify(t.Context(), target, reuse.Options{})
		blind.Close()
		require.ErrorContains(t, err, "nothing can be proven")
	}

	target.Decode = nil
	_, err := reuse.Verify(t.Context(), target, reuse.Options{})
	require.ErrorContains(t, err, "needs a way to ask")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = reuse.Verify(ctx, x.target(k), reuse.Options{})
	require.ErrorIs(t, err, context.Canceled)
}

func TestPromptsFitTheModel(t *testing.T) {
	k := conn(nixl.New(nil))
	x := start(t, k, enginesim.Config{MaxModelLen: 256}, enginesim.Config{MaxModelLen: 256})
	r := verified(t, x.target(k), reuse.Options{Probes: 1})
	require.Equal(t, reuse.Reused, r.Verdict, "%s", r)
}

func TestOtherTrafficIsTold(t *testing.T) {
	k := conn(nixl.New(nil))
	x := start(t, k, enginesim.Config{}, enginesim.Config{})
	ask := reuse.Flow(x.flow, nil)
	target := x.target(k)
	target.Ask = func(ctx context.Context, body []byte) (int, string, []byte, error) {
		other, _ := json.Marshal(
			map[string]any{"prompt": strings.Repeat("computed by D itself ", 100), "max_tokens": 1},
		)
		resp, err := http.Post(x.d.URL()+"/v1/completions", "application/json", strings.NewReader(string(other)))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		http.DefaultClient.CloseIdleConnections()
		return ask(ctx, body)
	}
	r := verified(t, target, reuse.Options{Probes: 1})
	require.True(t, r.Disturbed)
	require.Less(t, r.Reused, r.PromptTokens)
	require.Contains(t, r.String(), "other traffic")
}

func TestTheSyntheticProberChecksAgainAndAgain(t *testing.T) {
	k := conn(nixl.New(nil))
	x := start(t, k, enginesim.Config{}, enginesim.Config{})
	reports := make(chan *reuse.Report, 16)
	c, err := reuse.NewSyntheticProber(reuse.SyntheticProberOptions{Every: 10 * time.Millisecond,
		Targets:  func(context.Context) (reuse.Target, error) { return x.target(k), nil },
		OnReport: func(r *reuse.Report, err error) { require.NoError(t, err); reports <- r }})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- c.Run(ctx) }()
	for range 2 {
		r := <-reports
		require.Equal(t, reuse.Reused, r.Verdict, "%s", r)
		require.Zero(t, r.Compared, "the default compares no text with one engine alone")
		require.Len(t, r.Probes, 1)
	}
	cancel()
	require.NoError(t, <-ended)
	require.Equal(t, 1.0, c.Last().Ratio())
	_, err = reuse.NewSyntheticProber(reuse.SyntheticProberOptions{})
	require.Error(t, err)
}

// Verify never sends a whole request to an engine that would crash from it.
func TestVerifyAsksNoSenderAlone(t *testing.T) {
	c := conn(lmcachepd.New(nil))
	asked := false
	target := reuse.Target{Connector: c, Prefill: []string{"http://p:1"}, Decode: []string{"http://d:1"},
		Alone: "http://p:1/", Ask: func(context.Context, []byte) (int, string, []byte, error) {
			asked = true
			return 0, "", nil, context.Canceled
		}}
	_, err := reuse.Verify(t.Context(), target, reuse.Options{})
	require.ErrorContains(t, err, "is a prefill engine")
	require.False(t, asked)
}
