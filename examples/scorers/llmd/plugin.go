// SPDX-License-Identifier: Apache-2.0

// Package llmd has pdkit's decisions as a plugin of llm-d's router.
package llmd

import (
	"context"
	"errors"
	"time"

	"github.com/pdkit/pdkit/pdflow/decide"
)

type plugin struct {
	policy decide.Policy
	speed  decide.Speed
	blocks func(*InferenceRequest, Endpoint) int // of 16 tokens that an endpoint has cached, as an index of KV says
}

var matchKey = NewDataKey("PrefixCacheMatchInfoDataKey", "pdkit")

func (*plugin) TypedName() TypedName      { return TypedName{"pdkit-decider", "pdkit"} }
func (*plugin) Category() ScorerCategory  { return "Balance" }
func (*plugin) Produces() map[DataKey]any { return map[DataKey]any{matchKey: PrefixCacheMatchInfo{}} }
func (p *plugin) Produce(_ context.Context, r *InferenceRequest, pods []Endpoint) error {
	for _, pod := range pods {
		pod.Put(matchKey, NewPrefixCacheMatchInfo(p.blocks(r, pod), r.RequestSizeBytes/64, 16))
	}
	return nil
}
func (p *plugin) Score(_ context.Context, r *InferenceRequest, pods []Endpoint) map[Endpoint]float64 {
	scores := map[Endpoint]float64{}
	for i, pod := range pods {
		scores[pod] = 1 / (1 + p.decide(r, nil, pods[i:i+1]).TTFT.Seconds())
	}
	return scores
}
func (p *plugin) Admit(_ context.Context, r *InferenceRequest, pods []Endpoint) error {
	if d := p.decide(r, nil, pods); d.Action == decide.Refuse {
		return errors.New("no endpoint can serve in time; try again in " + d.RetryAfter.String())
	}
	return nil
}

// Pick runs the profiles prefill and decode. ProcessResults drops prefill where the decode endpoint is to do both.
func (p *plugin) Pick(_ context.Context, _ *InferenceRequest, all profiles, done results) profiles {
	if len(done) > 0 {
		return nil
	}
	return all
}
func (p *plugin) ProcessResults(_ context.Context, r *InferenceRequest, done results) (*SchedulingResult, error) {
	if p.decide(r, done["prefill"].TargetEndpoints, done["decode"].TargetEndpoints).Action == decide.DecodeAlone {
		delete(done, "prefill")
	}
	return &SchedulingResult{ProfileResults: done, PrimaryProfileName: "decode"}, nil
}

// decide asks the policy about endpoints, as far as the router knows them.
func (p *plugin) decide(r *InferenceRequest, prefill, decode []Endpoint) (d decide.Decision) {
	p.policy.Decide(&decide.Input{Prompt: r.RequestSizeBytes / 4, Class: decide.Class{Refusable: true},
		Prefill: p.candidates(prefill, false), Decode: p.candidates(decode, true)}, &d)
	return d
}

func (p *plugin) candidates(pods []Endpoint, alone bool) (all []decide.Candidate) {
	for _, pod := range pods {
		m := pod.GetMetrics()
		used := int(m.KVCacheUsagePercent * float64(m.KvCacheMaxTokenCapacity))
		c := decide.Candidate{Queue: m.WaitingQueueSize, Running: m.RunningRequestsSize, Context: used, Speed: p.speed,
			Age: time.Since(m.UpdateTime), Alone: alone,
			KV: decide.Memory{Free: m.KvCacheMaxTokenCapacity - used, Total: m.KvCacheMaxTokenCapacity}}
		match, _ := pod.Get(matchKey)
		if info, ok := match.(*PrefixCacheMatchInfo); ok {
			c.Cached, c.CachedExact = 16*info.MatchBlocksUnweighted(), true
		}
		all = append(all, c)
	}
	return all
}
