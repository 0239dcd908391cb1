// SPDX-License-Identifier: Apache-2.0

package model_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/model"
)

func TestAFitFindsTheTermsOfTheSteps(t *testing.T) {
	want := model.Llama8B().StepTime
	want.PerAttention = 1e-9
	r := rand.New(rand.NewPCG(1, 1))
	var exact, noisy []model.Observation
	for range 400 {
		l := model.Load{Requests: 1 + r.IntN(200), PrefillTokens: r.IntN(2) * r.IntN(8192)}
		l.ContextTokens = l.Requests * r.IntN(4000)
		l.Attention = l.PrefillTokens * (r.IntN(8192) + l.PrefillTokens/2)
		exact = append(exact, model.Observation{Load: l, Seconds: want.Seconds(l)})
		noisy = append(noisy, model.Observation{Load: l, Seconds: want.Seconds(l) * (1 + .03*r.NormFloat64())})
	}
	got, err := model.Fit(exact)
	require.NoError(t, err)
	terms := func(t model.StepTime) []float64 {
		return []float64{t.Base, t.PerRequest, t.PerContextToken, t.PerPrefillToken, t.PerAttention}
	}
	for i, x := range terms(got) {
		assert.InEpsilon(t, terms(want)[i], x, 1e-6)
	}
	got, err = model.Fit(noisy)
	require.NoError(t, err)
	for _, o := range exact {
		assert.InEpsilon(t, o.Seconds, got.Seconds(o.Load), .03)
	}
}

// What the runs do not show apart is not guessed: its time is in another term, and no term is below 0.
func TestAFitLeavesOutWhatTheStepsDoNotShow(t *testing.T) {
	var same, falling []model.Observation
	for i := range 10 {
		same = append(same, model.Observation{Load: model.Load{Requests: 1, PrefillTokens: 100 * i},
			Seconds: .01 + .001*float64(i)})
		falling = append(falling, model.Observation{Load: model.Load{Requests: 1 + i}, Seconds: .02 - .001*float64(i)})
	}
	got, err := model.Fit(same)
	require.NoError(t, err)
	assert.InEpsilon(t, .01, got.Base+got.PerRequest, 1e-6)
	assert.InEpsilon(t, 1e-5, got.PerPrefillToken, 1e-6)
	assert.Zero(t, got.PerContextToken)
	got, err = model.Fit(falling)
	require.NoError(t, err)
	assert.Zero(t, got.PerRequest)
	assert.Positive(t, got.Base)
	_, err = model.Fit(same[:3])
	require.Error(t, err)
	same[4].Seconds = 0
	_, err = model.Fit(same)
	require.Error(t, err)
}

func TestATransferWaitsForThoseBeforeItOnBothSides(t *testing.T) {
	l := model.Link{Latency: .1, BytesPerSecond: 10}
	var p0, p1, d0, d1 model.Port
	assert.InDelta(t, 1.1, l.Transfer(&p0, &d0, 10, 0), 1e-9)
	assert.InDelta(t, 2.1, l.Transfer(&p0, &d1, 10, 0), 1e-9, "P sends one after the other")
	assert.InDelta(t, 2.1, l.Transfer(&p1, &d0, 10, 0), 1e-9, "D receives one after the other")
	assert.InDelta(t, 9.1, l.Transfer(&p0, &d0, 10, 8), 1e-9)
	assert.InDelta(t, 9.1, model.Link{Latency: .1}.Transfer(&p0, &d0, 10, 9), 1e-9, "a link without a bound")
}

func TestAHistogramKeepsItsQuantiles(t *testing.T) {
	var h, g model.Histogram
	assert.Zero(t, h.Quantile(.5))
	for i := range 1000 {
		h.Add(float64(i+1)/1000, 1)
		g.Add(float64(i+1)/1000, 2)
	}
	h.Merge(&g)
	h.Merge(&model.Histogram{})
	assert.EqualValues(t, 3000, h.Count())
	for _, q := range []float64{.01, .5, .9, .99} {
		assert.InEpsilon(t, q, h.Quantile(q), .015)
	}
	h.Add(0, 1)
	h.Add(1e300, 1)
}

func TestASpecThatCannotBeIsRefused(t *testing.T) {
	for _, change := range []func(*model.Spec){
		func(s *model.Spec) { s.Base = -1 },
		func(s *model.Spec) { s.StepTime = model.StepTime{} },
		func(s *model.Spec) { s.BlockSize = 0 },
		func(s *model.Spec) { s.Blocks = -1 },
	} {
		s := model.Llama8B()
		require.NoError(t, s.Validate())
		change(&s)
		_, err := model.New(s)
		require.Error(t, err)
	}
}

// A prompt of 3,000 tokens and 200 tokens of response, alone on the engine.
func ExampleEngine() {
	e, _ := model.New(model.Llama8B())
	_ = e.Add(&model.Request{Prompt: 3000, Output: 200}, 0)
	for at, busy := e.Next(); busy; at, busy = e.Next() {
		for _, event := range e.Advance(at) {
			switch event.Kind {
			case model.First:
				fmt.Printf("first token after %.0f ms\n", 1000*event.At)
			case model.Ended:
				fmt.Printf("the last of %d after %.0f ms\n", event.Tokens, 1000*event.At)
			default:
			}
		}
	}
	// Output:
	// first token after 101 ms
	// the last of 200 after 1508 ms
}

// Designed runs of an engine: each row is a step that was timed.
func ExampleFit() {
	t, err := model.Fit([]model.Observation{
		{Load: model.Load{Requests: 1, ContextTokens: 1000}, Seconds: .0111},
		{Load: model.Load{Requests: 1, ContextTokens: 9000}, Seconds: .0191},
		{Load: model.Load{Requests: 40, ContextTokens: 40_000}, Seconds: .054},
		{Load: model.Load{Requests: 1, PrefillTokens: 1000}, Seconds: .0601},
		{Load: model.Load{Requests: 2, PrefillTokens: 8000}, Seconds: .4102},
	})
	fmt.Printf("%.1f ms, %.0f µs a request, %.0f µs a token of context, %.0f µs a token of prefill, %v\n", 1e3*t.Base,
		1e6*t.PerRequest, 1e6*t.PerContextToken, 1e6*t.PerPrefillToken, err)
	// Output: 10.0 ms, 100 µs a request, 1 µs a token of context, 50 µs a token of prefill, <nil>
}
