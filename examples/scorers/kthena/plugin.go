// SPDX-License-Identifier: Apache-2.0

// Package kthena has pdkit's predictions as a score plugin of Kthena's router.
package kthena

import (
	"math"

	"github.com/pdkit/pdkit/pdflow/decide"
)

type plugin struct {
	policy   decide.Policy
	speed    decide.Speed
	kvTokens int                                // of one engine's KV cache
	prompt   func(*Context) int                 // tokens of a request's prompt
	cached   func(ctx *Context, p *PodInfo) int // of them, those that a pod has
}

// Name is how Kthena's configuration names the plugin.
func (*plugin) Name() string { return "pdkit" }

// Score gives the pod with the earliest first token 100, and one that takes twice as long 50. Kthena asks once for the
// pods of each role, so each is taken by itself.
func (p *plugin) Score(ctx *Context, pods []*PodInfo) map[*PodInfo]int {
	ttft, best := map[*PodInfo]float64{}, 0.0
	for _, pod := range pods {
		in := decide.Input{Prompt: p.prompt(ctx), Decode: []decide.Candidate{p.candidate(ctx, pod)}}
		var d decide.Decision
		p.policy.Decide(&in, &d)
		if ttft[pod] = d.TTFT.Seconds(); ttft[pod] > 0 && (best == 0 || ttft[pod] < best) {
			best = ttft[pod]
		}
	}
	scores := map[*PodInfo]int{}
	for _, pod := range pods {
		if ttft[pod] > 0 {
			scores[pod] = int(math.Round(100 * best / ttft[pod]))
		}
	}
	return scores
}

func (p *plugin) candidate(ctx *Context, pod *PodInfo) decide.Candidate {
	used := int(pod.GetGPUCacheUsage() * float64(p.kvTokens))
	return decide.Candidate{Alone: true, Speed: p.speed, Cached: p.cached(ctx, pod),
		QueueTokens: int(pod.GetRequestWaitingNum()) * p.prompt(ctx), Running: int(pod.GetRequestRunningNum()),
		Context: used, KV: decide.Memory{Free: p.kvTokens - used, Total: p.kvTokens}}
}
