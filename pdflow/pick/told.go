// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"cmp"
	"sync/atomic"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
)

// WithLoad lets policies that look at loads know of requests that others have sent: other gateways, or programs that
// ask the engines themselves. load says what an engine said of itself last, as [inspect.Source.Reading] does. A Load
// whose At is zero says nothing; so should one that is too old.
//
// The picker takes an engine's running and waiting requests, less its own that are there, for the requests of others.
// It counts each as one of its own on average, until the engine says something else. Its own requests count from their
// pick on, so what was sent after the engine spoke is never missed. load is called a few times for each pick, for
// engines one after another and for those that are about to be chosen, and must be quick.
func WithLoad(load func(id string) inspect.Load) Option { return func(o *options) { o.load = load } }

// teller is an engine that says how busy it is.
type teller struct {
	id    string
	slots []*slot
	leg   leg
}

// hearMost is how many engines are heard with each pick, beside those that are chosen: those that others have left must
// be heard to be chosen again.
const hearMost = 4

// others is the load that an engine has from other programs' requests.
type others struct {
	at       atomic.Int64 // when the engine said so, Unix nanoseconds
	tokens   atomic.Int64 // of each of its ranks, part of its load
	requests atomic.Int64 // the picker's own, of one rank, in flight there
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
	said, known := s.opts.load(t.id), &t.slots[0].others
	at := int64(0)
	if !said.At.IsZero() {
		at = said.At.UnixNano()
	}
	before := known.at.Load()
	if before == at || !known.at.CompareAndSwap(before, at) {
		return false
	}
	foreign := int64(0)
	if at != 0 {
		foreign = int64(said.Running) + int64(said.Waiting)
		for _, slot := range t.slots {
			foreign -= slot.others.requests.Load()
		}
	}
	each := max(foreign, 0) * cmp.Or(s.means[t.leg].Load(), limitUsual) / int64(len(t.slots))
	for _, slot := range t.slots {
		if was := slot.others.tokens.Swap(each); was != each {
			slot.add(each - was)
		}
	}
	return true
}

// counted notes one more request of the picker's own, or one less.
func (s *state) counted(slot *slot, leg leg, cost, n int64) {
	if s.opts.load == nil {
		return
	}
	if slot.others.requests.Add(n); n < 0 {
		return
	}
	if mean := s.means[leg].Load(); mean == 0 {
		s.means[leg].Store(cost)
	} else {
		s.means[leg].Add((cost - mean) / 16)
	}
}
