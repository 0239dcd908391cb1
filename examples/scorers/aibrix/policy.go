// SPDX-License-Identifier: Apache-2.0

// Package aibrix has pdkit's predictions as score policies of AIBrix's router: for prefill by TTFT, for decode by ITL.
package aibrix

import "github.com/pdkit/pdkit/pdflow/decide"

type prefillPolicy struct {
	policy decide.Policy
	speed  decide.Speed
	cached func(model, prompt, pod string) (tokens int) // as an index of KV says
}

func (*prefillPolicy) Name() string { return "pdkit" }

// Prepare takes the request's prompt. Four bytes are a token.
func (p *prefillPolicy) Prepare(r *RoutingContext, _ []*Pod, _ map[string]struct{}) (PrefillScorer, error) {
	return &prefillScorer{p, r}, nil
}

type prefillScorer struct {
	*prefillPolicy
	r *RoutingContext
}

// PrefixHashes returns nil: the index has its own.
func (*prefillScorer) PrefixHashes() []uint64 { return nil }

// ScorePod returns the predicted TTFT in milliseconds. What runs at a prefill pod is a queue of requests like this one.
func (s *prefillScorer) ScorePod(pod *Pod, running, _ float64) float64 {
	prompt := len(s.r.Message) / 4
	in := decide.Input{Prompt: prompt, Decode: []decide.Candidate{{Alone: true, Speed: s.speed,
		QueueTokens: int(running) * prompt, Cached: s.cached(s.r.Model, s.r.Message, pod.Name)}}}
	var d decide.Decision
	s.policy.Decide(&in, &d)
	return d.TTFT.Seconds() * 1e3
}

type decodePolicy struct {
	policy decide.Policy
	speed  decide.Speed
}

func (*decodePolicy) Name() DecodePolicyName { return "pdkit" }
func (*decodePolicy) Describe() string       { return "pdkit: predicted time between two tokens" }

// ScoreDecodePod returns the predicted ITL in milliseconds, three times that where the KV cache is nearly full.
func (p *decodePolicy) ScoreDecodePod(r *RoutingContext, _ *Pod, x DecodePodInput) float64 {
	in := decide.Input{Prompt: len(r.Message) / 4, Decode: []decide.Candidate{{Alone: true, Speed: p.speed,
		Running: int(x.RunningReqs), Context: int(x.DecodeTokens)}}}
	var d decide.Decision
	if p.policy.Decide(&in, &d); x.FreeGPUPercent < 5 {
		d.ITL *= 3
	}
	return d.ITL.Seconds() * 1e3
}
