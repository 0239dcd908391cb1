// SPDX-License-Identifier: Apache-2.0

package llmd

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/decide"
)

var (
	_ DataProducer   = (*plugin)(nil)
	_ Scorer         = (*plugin)(nil)
	_ Admitter       = (*plugin)(nil)
	_ ProfileHandler = (*plugin)(nil)
)

// pod is an endpoint as the router has it.
type pod struct {
	name    string
	metrics Metrics
	kept    map[DataKey]Cloneable
}

func newPod(name string, waiting, running int) *pod {
	return &pod{name, Metrics{WaitingQueueSize: waiting, RunningRequestsSize: running, KVCacheUsagePercent: 0.2,
		KvCacheMaxTokenCapacity: 400_000, UpdateTime: time.Now()}, map[DataKey]Cloneable{}}
}

func (p *pod) GetMetrics() *Metrics            { return &p.metrics }
func (p *pod) String() string                  { return p.name }
func (p *pod) Get(k DataKey) (Cloneable, bool) { v, ok := p.kept[k]; return v, ok }
func (p *pod) Put(k DataKey, value Cloneable)  { p.kept[k] = value }
func decoded(cached int) func(*InferenceRequest, Endpoint) int {
	return func(_ *InferenceRequest, e Endpoint) int {
		if e.String() == "d0" {
			return cached / 16
		}
		return 0
	}
}

// run is what the router does with one request.
func run(t *testing.T, p *plugin, prompt int, prefill, decode []Endpoint) (ran []string, scores map[Endpoint]float64) {
	t.Helper()
	r := &InferenceRequest{RequestSizeBytes: 4 * prompt}
	all := append(append([]Endpoint{}, prefill...), decode...)
	require.NoError(t, p.Produce(t.Context(), r, all))
	require.NoError(t, p.Admit(t.Context(), r, all))
	scores = p.Score(t.Context(), r, all)
	best := func(pods []Endpoint) *ProfileRunResult {
		first := pods[0]
		for _, e := range pods {
			if scores[e] > scores[first] {
				first = e
			}
		}
		return &ProfileRunResult{TargetEndpoints: []Endpoint{first}}
	}
	done := results{}
	for name := range p.Pick(t.Context(), r, profiles{"prefill": nil, "decode": nil}, done) {
		done[name] = best(map[string][]Endpoint{"prefill": prefill, "decode": decode}[name])
	}
	require.Empty(t, p.Pick(t.Context(), r, profiles{"prefill": nil, "decode": nil}, done))
	got, err := p.ProcessResults(t.Context(), r, done)
	require.NoError(t, err)
	assert.Equal(t, "decode", got.PrimaryProfileName)
	for _, name := range []string{"prefill", "decode"} {
		if x := got.ProfileResults[name]; x != nil {
			ran = append(ran, x.TargetEndpoints[0].String())
		}
	}
	return ran, scores
}

func TestTheRouterSplitsWherePrefillIsTheBetterPlace(t *testing.T) {
	p := &plugin{decide.Predicted(decide.PredictedOptions{}),
		decide.Speed{Base: 6.83e-3, PerRequest: 4.42e-6, PerContext: 76.2e-9, PerPrompt: 31.4e-6}, decoded(0)}
	prefill := []Endpoint{newPod("p0", 3, 1), newPod("p1", 0, 0)}
	decode := []Endpoint{newPod("d0", 0, 40), newPod("d1", 0, 60)}
	ran, scores := run(t, p, 8000, prefill, decode)
	assert.Equal(t, []string{"p1", "d0"}, ran)
	for _, score := range scores {
		assert.Greater(t, score, 0.0)
		assert.LessOrEqual(t, score, 1.0)
	}
	p.blocks = decoded(7900)
	ran, _ = run(t, p, 8000, prefill, decode)
	assert.Equal(t, []string{"d0"}, ran, "the decode engine has the conversation")
}

func TestTheRouterRefusesWhatNobodyCanServeInTime(t *testing.T) {
	p := &plugin{decide.Predicted(decide.PredictedOptions{TTFT: 100 * time.Millisecond}),
		decide.Speed{Base: 6.83e-3, PerPrompt: 31.4e-6}, decoded(0)}
	err := p.Admit(t.Context(), &InferenceRequest{RequestSizeBytes: 8_000}, []Endpoint{newPod("d0", 200, 200)})
	assert.ErrorContains(t, err, "try again in ")
}
