// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"sync/atomic"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// roundRobin takes decode engines in turn, and for each the prefill engines of its group in turn.
type roundRobin struct {
	set   *discovery.Set
	table atomic.Pointer[table]
	apart atomic.Pointer[table] // of flows whose engines of role both take no part in pairs
	next  atomic.Uint64
	rests rests
	done  func(*pdflow.Outcome)
}

// RoundRobin picks decode engines in turn, and with each a prefill engine of its group, in turn too. An engine that
// failed rests for a second, longer if it fails again, as long as others of its role are there. So does a pair that a request has left an
// orphan in, as long as there are other pairs. A pick takes the same time for two and for
// ten thousand engines.
func RoundRobin(set *discovery.Set) pdflow.Picker {
	r := &roundRobin{set: set}
	r.done = r.rests.done
	return r
}

// Changed is closed at the set's next snapshot.
func (r *roundRobin) Changed() <-chan struct{} { return r.set.Changed() }

// Pick does not block.
func (r *roundRobin) Pick(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	t := r.load(in.Both)
	n := r.next.Add(1) - 1
	pick := pdflow.Pick{Done: r.done}
	if in.Single || in.Both && len(t.decodes) == 0 {
		list := t.singles
		if in.Both {
			list = t.boths
		}
		e := r.choose(list, n, in, "")
		if e == nil {
			return pdflow.Pick{}, t.nobody(in)
		}
		pick.Decode = *e
		return pick, nil
	}
	s := r.chooseSlot(t.decodes, n, in)
	if s == nil {
		return pdflow.Pick{}, t.nobody(in)
	}
	pick.Decode = *s.decode
	if p := r.choose(s.group.prefills, s.group.next.Add(1)-1, in, s.decode.ID); p != nil {
		pick.Prefill = *p
	} // else the decode engine is of role both and alone: it serves the whole request
	if in.Encode > 0 {
		pick.Encode = make([]discovery.Endpoint, 0, len(t.encodes))
		for i := range t.encodes {
			pick.Encode = append(pick.Encode, *t.encodes[(n+uint64(i))%uint64(len(t.encodes))])
		}
	}
	return pick, nil
}

func (r *roundRobin) load(apart bool) *table {
	kept := &r.table
	if apart {
		kept = &r.apart
	}
	snap := r.set.Load()
	t := kept.Load()
	if t == nil || t.snap != snap {
		t = newTable(snap, apart)
		kept.Store(t)
	}
	return t
}

// choose takes the n-th engine, or the next one that neither rests nor failed this request. For a prefill engine, decode is the one
// that it is to meet: it is never chosen itself, and the pair must not rest either.
func (r *roundRobin) choose(list []*discovery.Endpoint, n uint64, in *pdflow.PickInput, decode string) *discovery.Endpoint {
	var second, third *discovery.Endpoint
	for i := range uint64(len(list)) {
		e := list[(n+i)%uint64(len(list))]
		switch {
		case e.ID == decode:
		case in.Avoids(e.ID):
			third = orFirst(third, e)
		case r.rests.resting(e.ID) || decode != "" && r.rests.pairResting(e.ID, decode):
			second = orFirst(second, e)
		default:
			return e
		}
	}
	return orFirst(second, third)
}

func orFirst(first, e *discovery.Endpoint) *discovery.Endpoint {
	if first != nil {
		return first
	}
	return e
}

// chooseSlot is choose for decode engines. It prefers one whose group has a prefill engine other than itself.
func (r *roundRobin) chooseSlot(list []slot, n uint64, in *pdflow.PickInput) *slot {
	var best *slot
	rank := 4
	for i := range uint64(len(list)) {
		s := &list[(n+i)%uint64(len(list))]
		k := 0
		switch {
		case len(s.group.prefills) == 1 && s.group.prefills[0].ID == s.decode.ID:
			k = 3
		case in.Avoids(s.decode.ID) || !r.some(s.group.prefills, func(id string) bool { return !in.Avoids(id) }):
			k = 2
		case r.rests.resting(s.decode.ID) || !r.some(s.group.prefills, func(id string) bool { return !r.rests.resting(id) && !r.rests.pairResting(id, s.decode.ID) }):
			k = 1
		}
		if k == 0 {
			return s
		}
		if k < rank {
			best, rank = s, k
		}
	}
	return best
}

// some reports whether an engine of a group is good; nearly always the first is.
func (r *roundRobin) some(list []*discovery.Endpoint, good func(id string) bool) bool {
	for _, e := range list {
		if good(e.ID) {
			return true
		}
	}
	return false
}
