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

// slot is the state of one rank of one engine. It lives as long as the engine is listed, over many snapshots, and
// all pickers of a state share it.
type slot struct {
	id      uint32 // a picker never uses an id twice
	hash    uint64 // of the engine's ID and the rank
	load    atomic.Int64
	served  atomic.Int64
	met     [metMost]atomic.Uint32 // slots of the prefill engines that it was paired with, 0 for none; see Sticky
	others  *others                // of its engine, nil without WithLoad
	foreign atomic.Int64           // tokens of others' requests, part of load
	seen    uint64                 // the number of the snapshot in which the registry last saw it

	mu  sync.Mutex // held while load changes, so that it changes together with the totals of the lists that count it
	cur []member   // its places in the tables in use: one per picker, or two while a new table replaces one
}

// member is a slot's place in a list.
type member struct {
	list *list
	i    int32
}

// add adds tokens to the load, here and in the totals of all lists that count this slot.
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

// join adds the loads of the list's targets to its total, and keeps the total up to date from now on.
func (l *list) join() {
	for i, t := range l.targets {
		s := t.slot
		s.mu.Lock()
		l.total.Add(s.load.Load())
		s.cur = append(s.cur, member{l, int32(i)})
		s.mu.Unlock()
	}
}

// leave stops what join started.
func (l *list) leave() {
	for _, t := range l.targets {
		s := t.slot
		s.mu.Lock()
		s.cur = slices.DeleteFunc(s.cur, func(m member) bool { return m.list == l })
		s.mu.Unlock()
	}
}

// registry holds the slots of all engines in the newest snapshot that any picker has loaded.
type registry struct {
	seed   uint64
	told   bool // engines say how busy they are: see WithLoad
	ids    uint32
	rounds uint64
	slots  map[string][]*slot // by endpoint and rank
}

// follow updates the registry to a snapshot. An engine that is listed but not ready keeps its slots, since streams may
// still run there. So does an engine whose number of ranks changes, for the ranks that it had.
func (r *registry) follow(snap *discovery.Snapshot) {
	if r.slots == nil {
		r.slots = make(map[string][]*slot, len(snap.Endpoints))
	}
	r.rounds++
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		slots := r.slots[e.ID]
		ranks, _ := ranksOf(e)
		if len(slots) != ranks {
			slots = slices.Clone(slots[:min(len(slots), ranks)])
			var known *others
			if len(slots) > 0 {
				known = slots[0].others
			} else if r.told {
				known = &others{}
			}
			for k := len(slots); k < ranks; k++ {
				r.ids++
				slots = append(slots, &slot{id: r.ids, hash: hashBytes(r.seed+uint64(k), []byte(e.ID)),
					others: known})
			}
			r.slots[e.ID] = slots
		}
		slots[0].seen = r.rounds
	}
	if len(r.slots) > len(snap.Endpoints) {
		maps.DeleteFunc(r.slots, func(_ string, slots []*slot) bool { return slots[0].seen != r.rounds })
	}
}

// ticket holds the load of one attempt: until Done, and for the prefill leg until PrefillDone if that comes first, or
// if the leg runs on.
type ticket struct {
	s     *state
	slots [2]*slot
	cost  [2]int64
	open  [2]atomic.Bool
	there atomic.Int32             // whether the decode engine has the request
	legs  atomic.Int32             // that hold load
	ended func(*pdflow.LegOutcome) // made once per ticket, like done, so that a pick allocates nothing
	done  func(*pdflow.Outcome)    //
}

func (s *state) ticket(q *query, prefill, decode *target, late bool) *ticket {
	t, _ := s.tickets.Get().(*ticket)
	if t == nil {
		t = &ticket{s: s}
		t.ended, t.done = t.endPrefill, t.end
	}
	for i, e := range [2]*target{prefill, decode} {
		t.slots[i], t.cost[i] = nil, q.cost[i]
		if e != nil {
			t.slots[i] = e.slot
			e.slot.served.Add(1)
			e.slot.add(q.cost[i])
			if s.opts.load != nil {
				s.counted(leg(i), q.cost[i])
			}
		}
		t.open[i].Store(true)
	}
	t.legs.Store(int32(len(t.open)))
	if s.opts.load != nil {
		t.begin(late)
	}
	return t
}

func (t *ticket) endPrefill(*pdflow.LegOutcome) { t.endLeg(prefillLeg) }

// endLeg removes a leg's load, and reports whether it was there.
func (t *ticket) endLeg(leg leg) bool {
	if !t.open[leg].CompareAndSwap(true, false) {
		return false
	}
	if t.slots[leg] != nil {
		t.slots[leg].add(-t.cost[leg])
	}
	if t.s.opts.load != nil {
		t.left(leg)
	}
	if t.legs.Add(-1) == 0 {
		t.s.tickets.Put(t)
	}
	return true
}

// end removes the attempt's load, but for that of a prefill leg that runs on. Later calls do nothing.
func (t *ticket) end(o *pdflow.Outcome) {
	s := t.s // another attempt may have t after endLeg
	if !o.PrefillRuns {
		t.endPrefill(nil)
	}
	if t.endLeg(decodeLeg) {
		s.cooldowns.done(o)
	}
}
