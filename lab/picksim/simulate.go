// SPDX-License-Identifier: Apache-2.0

package main

import (
	"container/heap"
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/lab/internal/endpoints"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// result holds the figures of one policy.
type result struct {
	policy         string
	reused, prompt int       // tokens
	first, whole   []float64 // seconds to the first token and to the last, sorted
	prefillLoad    []float64 // seconds that each prefill engine computed
	decodeLoad     []float64 // tokens that each decode engine made
	pairs          int       // different pairs that have served a request
	crossed        int       // requests whose KV went from zone to zone
}

// event is something that happens at a time of the simulation. Of two events at the same time, the one that was planned
// first comes first.
type event struct {
	at float64
	n  int
	do func(now float64)
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].n < e[j].n
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) } //nolint:errcheck // nothing else is pushed
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// simulation is one run of a trace with one policy.
type simulation struct {
	f      fleet
	picker pdflow.Picker
	queue  events
	n      int
	p      map[string]*prefiller
	d      map[string]*decoder
	met    map[[2]string]bool
	out    *result
}

func (s *simulation) plan(at float64, do func(now float64)) {
	s.n++
	heap.Push(&s.queue, event{at, s.n, do})
}

// simulate runs the trace in simulated time. The picker is the real one, and its Done is called at each request's end.
func simulate(ctx context.Context, f fleet, policy pick.Policy, seed uint64, jobs []*job) (*result, error) {
	set, stop, err := f.run(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	s := &simulation{f: f, picker: pick.New(set, policy, pick.WithSeed(seed)), p: map[string]*prefiller{},
		d:   map[string]*decoder{},
		met: map[[2]string]bool{}, out: &result{policy: policy.String()}}
	for _, e := range set.Load().Endpoints {
		if e.Role == discovery.RolePrefill {
			s.p[e.ID] = newPrefiller(f)
		} else {
			s.d[e.ID] = &decoder{f: f}
		}
	}
	var failed error
	for _, j := range jobs {
		s.plan(j.at, func(now float64) {
			if err := s.arrive(ctx, j, now); err != nil {
				failed = err
			}
		})
	}
	for len(s.queue) > 0 && failed == nil {
		e, _ := heap.Pop(&s.queue).(event)
		e.do(e.at)
	}
	if failed != nil {
		return nil, fmt.Errorf("policy %s: %w", policy, failed)
	}
	for _, e := range set.Load().Endpoints {
		if e.Role == discovery.RolePrefill {
			s.out.prefillLoad = append(s.out.prefillLoad, s.p[e.ID].busy)
		} else {
			s.out.decodeLoad = append(s.out.decodeLoad, float64(s.d[e.ID].tokens))
		}
	}
	s.out.pairs = len(s.met)
	slices.Sort(s.out.first)
	slices.Sort(s.out.whole)
	return s.out, nil
}

// run returns a running discovery.Set with the fleet's engines.
func (f fleet) run(ctx context.Context) (*discovery.Set, func(), error) {
	var all []discovery.Endpoint
	for i := range f.prefill + f.decode {
		role, name := discovery.RolePrefill, "p"+strconv.Itoa(i)
		if i >= f.prefill {
			role, name = discovery.RoleDecode, "d"+strconv.Itoa(i-f.prefill)
		}
		e, err := discovery.New("http://"+name+":8000", role)
		if err != nil {
			return nil, nil, err
		}
		e.ID, e.Zone = name, "zone"+strconv.Itoa(i%f.zones)
		all = append(all, e)
	}
	return endpoints.Run(ctx, all...)
}

// arrive picks a pair and queues the request at its prefill engine.
func (s *simulation) arrive(ctx context.Context, j *job, now float64) error {
	pair, err := s.picker.Pick(ctx, j.in)
	if err != nil {
		return err
	}
	p := s.p[pair.Prefill.ID]
	start := max(now, p.freeAt)
	// The engine serves prompts in the order of arrival: when it begins this one, all earlier ones are in its cache.
	cached := min(p.cached(j), j.tokens-1)
	took := .005 + float64(j.tokens-cached)/s.f.tokensPerSecond
	p.keep(j)
	p.freeAt = start + took
	p.busy += took
	s.out.reused += cached
	s.out.prompt += j.tokens
	if pair.PrefillDone != nil {
		s.plan(p.freeAt, func(float64) { pair.PrefillDone(nil) })
	}
	s.plan(p.freeAt+s.transfer(j, &pair), func(t float64) { s.decode(j, &pair, now, t) })
	return nil
}

// transfer returns the seconds that the KV takes from P to D.
func (s *simulation) transfer(j *job, pair *pdflow.Pick) float64 {
	took := float64(j.tokens) * s.f.bytesPerToken / s.f.bytesPerSecond
	if pair.Prefill.Zone != pair.Decode.Zone {
		took *= 4
		s.out.crossed++
	}
	if key := [2]string{pair.Prefill.ID, pair.Decode.ID}; !s.met[key] {
		s.met[key] = true
		took += s.f.handshake
	}
	return took
}

// decode adds a request to the steps of its decode engine.
func (s *simulation) decode(j *job, pair *pdflow.Pick, began, now float64) {
	d := s.d[pair.Decode.ID]
	d.advance(now)
	r := &row{until: d.steps + float64(j.output)}
	d.rows = append(d.rows, r)
	s.out.first = append(s.out.first, now+d.step()-began)
	r.done = func() {
		s.out.whole = append(s.out.whole, d.at-began)
		d.tokens += j.output
		pair.Done(&pdflow.Outcome{})
	}
	s.follow(d)
}

// follow plans the event for the request that will end first. Events that were planned before the engine's last change
// are ignored.
func (s *simulation) follow(d *decoder) {
	d.round++
	round := d.round
	r, at := d.next()
	if r == nil {
		return
	}
	s.plan(at, func(now float64) {
		if round != d.round {
			return
		}
		d.advance(now)
		d.rows = slices.DeleteFunc(d.rows, func(x *row) bool { return x == r })
		r.done()
		s.follow(d)
	})
}
