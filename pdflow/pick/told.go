// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"cmp"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow/internal/inflight"
)

// WithLoad lets policies that look at loads know of requests that others have sent: other gateways, or programs that
// ask the engines themselves. load says what an engine said of itself last, as [inspect.Source.Reading] does. A Load
// whose At is zero says nothing; so should one that is too old.
//
// The picker takes an engine's running and waiting requests, less its own that were there when the engine said so, for
// the requests of others. It counts each as one of its own on average, until the engine says something else. Its own
// requests count from their pick on, so what was sent after the engine spoke is never missed, and nothing counts twice.
// An engine that says nothing, or far less than the picker's own requests, is taken to have as many of others' as the
// other engines of its role: it would look idle to all gateways, and get everything. load is called a few times for
// each pick, for engines one after another and for those that are about to be chosen, and must be quick.
func WithLoad(load func(id string) inspect.Load) Option { return func(o *options) { o.load = load } }

// WithNow is the clock by which the picker knows what an engine had when it said how busy it is ([WithLoad]), for
// simulations. Without it that is time.Now.
func WithNow(now func() time.Time) Option { return func(o *options) { o.now = now } }

// teller is an engine that says how busy it is.
type teller struct {
	id    string
	slots []*slot
	leg   leg
}

// hearMost is how many engines are heard with each pick, beside those that are chosen: those that others have left must
// be heard to be chosen again.
const hearMost = 4

// others is what an engine has said of its load, and what the picker had there.
type others struct {
	at  atomic.Int64 // when the engine said so, Unix nanoseconds
	own inflight.Engine
}

// tellers are the engines of a snapshot.
type tellers struct {
	all  []*teller
	byID map[string]*teller
}

func newTellers(snap *discovery.Snapshot, known *registry) *tellers {
	out := &tellers{byID: make(map[string]*teller, len(snap.Endpoints))}
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		t := &teller{id: e.ID, slots: known.slots[e.ID]}
		if e.Role.Has(discovery.RoleDecode) {
			t.leg = decodeLeg
		}
		if len(t.slots) > 0 {
			out.all, out.byID[t.id] = append(out.all, t), t
		}
	}
	return out
}

// hearNext hears the next engines.
func (s *state) hearNext(t *tellers) {
	n := uint64(len(t.all))
	for range min(hearMost, n) {
		s.hear(t.all[s.heard.Add(1)%n])
	}
}

// hear takes in what an engine says, and reports whether that was news.
func (s *state) hear(t *teller) bool {
	said, known := s.opts.load(t.id), t.slots[0].others
	at := int64(0)
	if !said.At.IsZero() {
		at = said.At.UnixNano()
	}
	before := known.at.Swap(at)
	foreign, _ := s.strangers[t.leg].Others(&known.own, said.Running+said.Waiting, said.At, s.opts.now())
	cost := float64(cmp.Or(s.means[t.leg].Load(), limitUsual))
	each := int64(foreign * cost / float64(len(t.slots)))
	for _, slot := range t.slots {
		if was := slot.foreign.Swap(each); was != each {
			slot.add(each - was)
		}
	}
	return before != at
}

// Whether the decode engine of a ticket has its request.
const (
	coming = iota
	there
	gone
)

// begin notes which engines have the request. The decode engine has it later where it gets it after the prefill: then
// it says nothing of it before.
func (t *ticket) begin(late bool) {
	p, d := t.slots[prefillLeg], t.slots[decodeLeg]
	if t.there.Store(there); p != nil {
		t.s.has(p, 1)
		if late {
			t.there.Store(coming)
			return
		}
	}
	t.s.has(d, 1)
}

// left notes that a leg has ended.
func (t *ticket) left(leg leg) {
	p, d := t.slots[prefillLeg], t.slots[decodeLeg]
	switch {
	case leg == decodeLeg:
		if t.there.Swap(gone) == there {
			t.s.has(d, -1)
		}
	case p != nil:
		t.s.has(p, -1)
		if t.there.CompareAndSwap(coming, there) {
			t.s.has(d, 1)
		}
	}
}

func (s *state) has(slot *slot, n int) {
	if slot != nil {
		slot.others.own.Add(n, s.opts.now())
	}
}

// counted takes in what one more request of the picker's own costs.
func (s *state) counted(leg leg, cost int64) {
	if mean := s.means[leg].Load(); mean == 0 {
		s.means[leg].Store(cost)
	} else {
		s.means[leg].Add((cost - mean) / 16)
	}
}
