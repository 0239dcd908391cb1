// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"slices"
	"time"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/attest"
	"github.com/pdkit/pdkit/pdflow/pick"
)

const (
	pairsKept  = 512 // pairs that are counted one by one; the others are counted together
	pairsShown = 100 // the busiest of them
	pairAway   = 10 * time.Minute
	pairEvery  = time.Millisecond // at most so often one leaves its place: in a large fleet each request has a new one
	pairLooks  = 16               // pairs of which one leaves its place: to look at all would cost each request 30 µs
	pairMean   = 32               // requests that the means of a pair are over, about
)

type pairKey struct{ prefill, decode string }

// pairCount is what the requests of one pair came to since it is counted.
type pairCount struct {
	served, failed, reused int64
	handoff, first         movingMean // ms
	last                   time.Time
}

func (c *pairCount) requests() int64 { return c.served + c.failed }

// movingMean is a mean over about the last pairMean values.
type movingMean struct {
	n     int
	value float64
}

func (m *movingMean) add(v float64) {
	m.n = min(m.n+1, pairMean)
	m.value += (v - m.value) / float64(m.n)
}

// known returns the mean, nil without a value.
func (m *movingMean) known() *float64 {
	if m.n == 0 {
		return nil
	}
	v := m.value
	return &v
}

// pairTable counts requests by pair. A fleet of 64 prefill and 64 decode engines has 4,096 pairs: when pairsKept of
// them are counted, a new one takes the place of one out of pairLooks: of one that had no request for pairAway, or else
// of the least busy one. So busy pairs stay. That happens once in pairEvery;
// other requests of pairs without a place are counted in others, as is what those had that left.
type pairTable struct {
	m       map[pairKey]*pairCount
	others  otherPairs
	evicted time.Time // when the last pair left its place
}

func (t *pairTable) add(o *pdflow.Outcome, now time.Time) {
	s := o.Session
	if s.Prefill.ID == "" || s.Decode.ID == "" { // one engine serves the request
		return
	}
	key := pairKey{s.Prefill.ID, s.Decode.ID}
	c := t.m[key]
	if c == nil {
		if t.m == nil {
			t.m = map[pairKey]*pairCount{}
		}
		if len(t.m) == pairsKept {
			if now.Sub(t.evicted) < pairEvery {
				t.others.count(o)
				return
			}
			t.evict(now)
		}
		c = &pairCount{}
		t.m[key] = c
	}
	c.last = now
	if o.Err != nil {
		c.failed++
		return
	}
	c.served++
	c.reused += o.Usage.Reused
	if o.HandoffAge > 0 {
		c.handoff.add(milliseconds(o.HandoffAge))
	}
	p, d := &o.Prefill, &o.Decode
	// as pd.transfer.duration: a response that is no stream has its first byte when its last token is made
	if s.Request != nil && s.Request.Stream && !p.End.IsZero() && o.Resumed == 0 && d.FirstByte.After(p.End) {
		c.first.add(milliseconds(d.FirstByte.Sub(p.End)))
	}
}

func (t *pairTable) evict(now time.Time) {
	t.evicted = now
	var worst pairKey
	var least *pairCount
	looks := 0
	for key, c := range t.m { // in random order
		if looks++; looks > pairLooks {
			break
		}
		if now.Sub(c.last) > pairAway {
			worst, least = key, c
			break
		}
		if least == nil || cmp.Or(cmp.Compare(c.requests(), least.requests()), c.last.Compare(least.last)) < 0 {
			worst, least = key, c
		}
	}
	t.others.add(least.served, least.failed, least.reused)
	delete(t.m, worst)
}

// livePair is one pair of live.json. Its means are over about its last 32 requests.
type livePair struct {
	Prefill  string   `json:"prefill"` // endpoint IDs
	Decode   string   `json:"decode"`
	Served   int64    `json:"served"`
	Failed   int64    `json:"failed"`
	Reused   int64    `json:"reused"`             // prompt tokens that decode did not compute, where its response tells
	Handoff  *float64 `json:"handoff,omitempty"`  // ms from prefill's response to the decode leg, in the gateway
	Transfer *float64 `json:"transfer,omitempty"` // ms from prefill's response to the first token of a stream
	State    string   `json:"state,omitempty"`    // cooldown, hung (one after timeouts), quarantine
	Left     float64  `json:"left,omitempty"`     // ms until the cooldown ends
}

// otherPairs adds up the pairs that are not listed.
type otherPairs struct {
	Served int64 `json:"served"`
	Failed int64 `json:"failed"`
	Reused int64 `json:"reused"`
}

// count adds a request of a pair that is not listed.
func (o *otherPairs) count(out *pdflow.Outcome) {
	if out.Err != nil {
		o.add(0, 1, 0)
	} else {
		o.add(1, 0, out.Usage.Reused)
	}
}

func (o *otherPairs) add(served, failed, reused int64) {
	o.Served, o.Failed, o.Reused = o.Served+served, o.Failed+failed, o.Reused+reused
}

// counted returns the pairs that are counted one by one, in no order, and what the others had.
func (t *pairTable) counted() ([]livePair, otherPairs) {
	all := make([]livePair, 0, len(t.m))
	for key, c := range t.m {
		all = append(all, livePair{Prefill: key.prefill, Decode: key.decode, Served: c.served, Failed: c.failed,
			Reused: c.reused, Handoff: c.handoff.known(), Transfer: c.first.known()})
	}
	return all, t.others
}

// stateRank orders pairs for the list of the busiest: one in quarantine goes first, then those in a cooldown.
var stateRank = map[string]int{"quarantine": 0, "hung": 1, "cooldown": 2, "": 3}

// busiest returns the busiest of the counted pairs and those of which states says something, in the order of their
// names. The ones that are not returned are added to others, which is nil if there is none.
func busiest(all []livePair, others otherPairs, states map[pairKey]livePair) ([]livePair, *otherPairs) {
	known := make(map[pairKey]bool, len(all))
	for i := range all {
		key := pairKey{all[i].Prefill, all[i].Decode}
		known[key] = true
		all[i].State, all[i].Left = states[key].State, states[key].Left
	}
	for key, s := range states {
		if !known[key] {
			all = append(all, s)
		}
	}
	byName := func(a, b livePair) int {
		return cmp.Or(cmp.Compare(a.Prefill, b.Prefill), cmp.Compare(a.Decode, b.Decode))
	}
	slices.SortFunc(all, func(a, b livePair) int {
		return cmp.Or(cmp.Compare(stateRank[a.State], stateRank[b.State]),
			cmp.Compare(b.Served+b.Failed, a.Served+a.Failed), byName(a, b))
	})
	for _, p := range all[min(len(all), pairsShown):] {
		others.add(p.Served, p.Failed, p.Reused)
	}
	all = all[:min(len(all), pairsShown)]
	slices.SortFunc(all, byName)
	if others == (otherPairs{}) {
		return all, nil
	}
	return all, &others
}

// livePairs lists the model's pairs, and what the gateway knows against engines and pairs.
func (m *model) livePairs() (pairs []livePair, others *otherPairs, engines map[string]livePair) {
	states, engines := map[pairKey]livePair{}, map[string]livePair{}
	for _, c := range pick.Cooldowns(m.choosing) {
		s := livePair{Prefill: c.Engine, Decode: c.Decode, State: "cooldown", Left: milliseconds(c.Left)}
		if c.Hung {
			s.State = "hung"
		}
		if c.Decode == "" {
			engines[c.Engine] = s
		} else {
			states[pairKey{c.Engine, c.Decode}] = s
		}
	}
	for _, s := range m.picker.Suspects() { // the longer lasting, so it hides a cooldown
		addSuspect(states, engines, s)
	}
	counted, left := m.recent.countedPairs()
	pairs, others = busiest(counted, left, states)
	return pairs, others, engines
}

// addSuspect puts a suspect among the pairs or, where only one engine is suspected, among the engines.
func addSuspect(pairs map[pairKey]livePair, engines map[string]livePair, s attest.Suspect) {
	state := livePair{Prefill: s.Prefill, Decode: s.Decode, State: "quarantine"}
	if s.Prefill != "" && s.Decode != "" {
		pairs[pairKey{s.Prefill, s.Decode}] = state
		return
	}
	engines[s.Prefill+s.Decode] = state // one of the two is ""
}
