// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"sync"
	"sync/atomic"

	"github.com/pdkit/pdkit/pdflow"
)

// slot is what is known of one rank of one engine for as long as the engine is listed: it outlives snapshots.
type slot struct {
	id     uint32 // never used again by the same picker
	hash   uint64 // of the engine's ID and the rank
	load   atomic.Int64
	served atomic.Int64
	met    [metMost]atomic.Uint32 // slots of prefill engines, 0 for none; see Sticky

	mu   sync.Mutex // load changes together with the totals of the lists that count it
	cur  []member
	next []member // of a table that is being made; its maker's alone
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

// join counts the slot in the lists of a table that is being made, beside those of the current one. It returns how many they are.
func (s *slot) join() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.next)
	for _, m := range s.next {
		m.list.total.Add(s.load.Load())
	}
	s.cur, s.next = append(s.cur, s.next...), nil
	return n
}

// leave ends the counting in lists before those of a new table, which are the last n.
func (s *slot) leave(n int) {
	s.mu.Lock()
	s.cur = append([]member(nil), s.cur[len(s.cur)-n:]...)
	s.mu.Unlock()
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
	p.rests.done(o)
}
