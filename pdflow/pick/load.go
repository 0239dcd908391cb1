// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// slot is what is known of one rank of one engine for as long as the engine is listed: it outlives snapshots, and is
// the same for all views of a picker.
type slot struct {
	id     uint32 // never used again by the same picker
	hash   uint64 // of the engine's ID and the rank
	load   atomic.Int64
	served atomic.Int64
	met    [metMost]atomic.Uint32 // slots of prefill engines, 0 for none; see Sticky
	seen   uint64                 // the registry's

	mu  sync.Mutex // load changes together with the totals of the lists that count it
	cur []member   // of the tables in use: one of each view, and two while one takes the other's place
}

// member is a slot's place in a list.
type member struct {
	list *list
	i    int32
}

// add changes the load by tokens, in all lists that the slot is in.
func (s *slot) add(tokens int64) {
	s.mu.Lock()
	s.load.Add(tokens)
	for _, m := range s.cur {
		m.list.total.Add(tokens)
		if m.list.tree != nil {
			m.list.tree.update(int(m.i))
		}
	}
	s.mu.Unlock()
}

// join counts the loads of the list's targets in it from now on.
func (l *list) join() {
	for i, t := range l.targets {
		s := t.slot
		s.mu.Lock()
		l.total.Add(s.load.Load())
		s.cur = append(s.cur, member{l, int32(i)})
		s.mu.Unlock()
	}
}

// leave ends that.
func (l *list) leave() {
	for _, t := range l.targets {
		s := t.slot
		s.mu.Lock()
		s.cur = slices.DeleteFunc(s.cur, func(m member) bool { return m.list == l })
		s.mu.Unlock()
	}
}

// registry holds the slots of the engines in the latest snapshot that any view has taken over.
type registry struct {
	seed   uint64
	ids    uint32
	rounds uint64
	slots  map[string][]*slot // by endpoint and rank
}

// follow brings the registry to a snapshot. An engine that is listed but not ready keeps its slots: streams may still
// run there. So does one whose number of ranks changes, for the ranks that it had.
func (r *registry) follow(snap *discovery.Snapshot) {
	if r.slots == nil {
		r.slots = make(map[string][]*slot, len(snap.Endpoints))
	}
	r.rounds++
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		slots, ranks := r.slots[e.ID], ranksOf(e)
		if len(slots) != ranks {
			slots = slices.Clone(slots[:min(len(slots), ranks)])
			for k := len(slots); k < ranks; k++ {
				r.ids++
				slots = append(slots, &slot{id: r.ids, hash: hashBytes(r.seed+uint64(k), []byte(e.ID))})
			}
			r.slots[e.ID] = slots
		}
		slots[0].seen = r.rounds
	}
	if len(r.slots) > len(snap.Endpoints) {
		maps.DeleteFunc(r.slots, func(_ string, slots []*slot) bool { return slots[0].seen != r.rounds })
	}
}

// ticket is the load of one attempt, from Pick to Done; that of its prefill leg to PrefillDone, if it comes first.
type ticket struct {
	p     *picker
	slots [2]*slot
	cost  [2]int64
	open  [2]atomic.Bool
	ended func()                // bound once, as is done, so that a pick allocates nothing
	done  func(*pdflow.Outcome) //
}

func (p *picker) ticket(q *query, prefill, decode *target) *ticket {
	t, _ := p.tickets.Get().(*ticket)
	if t == nil {
		t = &ticket{p: p}
		t.ended, t.done = t.endPrefill, t.end
	}
	for i, e := range [2]*target{prefill, decode} {
		t.slots[i], t.cost[i] = nil, q.cost[i]
		if e != nil {
			t.slots[i] = e.slot
			e.slot.served.Add(1)
			e.slot.add(q.cost[i])
		}
		t.open[i].Store(true)
	}
	return t
}

func (t *ticket) endPrefill() {
	if t.open[prefillLeg].CompareAndSwap(true, false) && t.slots[prefillLeg] != nil {
		t.slots[prefillLeg].add(-t.cost[prefillLeg])
	}
}

// end takes the load away, once.
func (t *ticket) end(o *pdflow.Outcome) {
	t.endPrefill()
	if !t.open[decodeLeg].CompareAndSwap(true, false) {
		return
	}
	t.slots[decodeLeg].add(-t.cost[decodeLeg])
	p := t.p
	p.tickets.Put(t)
	p.cooldowns.done(o)
}
