// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"strconv"
	"sync/atomic"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// table is what pickers derive from one snapshot: made once per snapshot, so that a pick does not depend on the number of endpoints.
type table struct {
	snap    *discovery.Snapshot
	pairs   *list   // of the leg that the policy chooses first: ready engines that can meet a ready engine of the other
	singles *list   // decode engines
	boths   *list   // engines of role both
	hasBoth bool    // one is known, ready or not
	lists   []*list // all, those of partners included
	encodes []*discovery.Endpoint
	engines map[string][]*slot // by endpoint and rank: what outlives the snapshot
	turns   map[turnKey]*atomic.Uint64
	ready   [2]int // engines of each leg
	grouped bool   // a group has ready engines of both legs
}

// turnKey is a list's name from snapshot to snapshot.
type turnKey struct {
	kind     listKind
	classKey // whose engines meet those in the list, for peersOf
}

type listKind byte

const (
	ofPairs listKind = iota
	ofSingles
	ofBoths
	peersOf
)

// ranksMost is the largest dpSize whose ranks are told apart: a wrong attribute must not cost memory. Beyond, sessions choose.
const ranksMost = 1024

// builder makes a table.
type builder struct {
	*table
	old     *table
	opts    *options
	needs   needs
	first   leg
	apart   bool // engines of role both take no part in pairs
	alone   []*target
	ids     *uint32
	classes map[classKey]*class
	order   []*class // as their engines came, so that what is made of a snapshot is always the same
	slots   []*slot  // of the new table
}

// newTable sorts a snapshot's engines. apart keeps those of role both out of pairs.
func newTable(snap *discovery.Snapshot, old *table, o *options, p Policy, apart bool, ids *uint32) (*table, []*slot) {
	b := &builder{table: &table{snap: snap, turns: map[turnKey]*atomic.Uint64{}}, old: old, opts: o, needs: p.needs, first: p.first, apart: apart, ids: ids, classes: map[classKey]*class{}}
	if b.needs.loads {
		b.engines = make(map[string][]*slot, len(snap.Endpoints))
	}
	for i := range snap.Endpoints {
		b.endpoint(&snap.Endpoints[i])
	}
	b.meet()
	var pairs, singles, boths []*target
	for _, c := range b.order {
		for i := range c.legs[b.first] {
			t := &c.legs[b.first][i]
			if t.peers = c.partners[b.first]; t.peers != nil {
				t.lonely = t.peers.engines == 1 && t.peers.targets[0].endpoint.ID == t.endpoint.ID
				pairs = append(pairs, t)
			}
		}
		for i := range c.legs[decodeLeg] {
			t := &c.legs[decodeLeg][i]
			singles = append(singles, t)
			if t.endpoint.Role.Has(discovery.RoleBoth) {
				boths = append(boths, t)
			}
		}
	}
	singles, boths = append(singles, b.alone...), append(boths, b.alone...)
	b.pairs = b.list(ofPairs, classKey{}, pairs)
	if b.singles = b.pairs; b.first != decodeLeg || len(singles) != len(pairs) {
		b.singles = b.list(ofSingles, classKey{}, singles)
	}
	if b.boths = b.singles; len(boths) != len(singles) {
		b.boths = b.list(ofBoths, classKey{}, boths)
	}
	return b.table, b.slots
}

// endpoint puts an endpoint into its class.
func (b *builder) endpoint(e *discovery.Endpoint) {
	ranks := 1
	if n, err := strconv.ParseUint(e.Attribute("dpSize"), 10, 16); err == nil && n > 1 && n <= ranksMost {
		ranks = int(n)
	}
	slots := b.remember(e, ranks)
	both := e.Role.Has(discovery.RoleBoth)
	b.hasBoth = b.hasBoth || both
	if e.Phase != discovery.PhaseReady || e.URL == nil {
		return
	}
	if e.Role.Has(discovery.RoleEncode) {
		b.encodes = append(b.encodes, e)
	}
	if e.Role&discovery.RoleBoth == 0 {
		return
	}
	b.slots = append(b.slots, slots...)
	if both && b.apart {
		for _, t := range targets(e, ranks, decodeLeg, slots) {
			b.alone = append(b.alone, &t)
		}
		return
	}
	key, values := b.opts.classOf(e)
	c := b.classes[key]
	if c == nil {
		c = &class{key: key, values: values}
		b.classes[key] = c
		b.order = append(b.order, c)
	}
	for side, role := range [2]discovery.Role{discovery.RolePrefill, discovery.RoleDecode} {
		if !e.Role.Has(role) {
			continue
		}
		b.ready[side]++
		c.legs[side] = append(c.legs[side], targets(e, ranks, leg(side), slots)...)
	}
}

// targets are an endpoint's ranks on one leg.
func targets(e *discovery.Endpoint, ranks int, side leg, slots []*slot) []target {
	list := make([]target, ranks)
	for r := range list {
		list[r] = target{endpoint: e, rank: int32(r), leg: side}
		if ranks == 1 {
			list[r].rank = -1
		}
		if slots != nil {
			list[r].slot = slots[r]
		}
	}
	return list
}

// remember returns the endpoint's slots, those of the last table if it was there. An engine that is listed but not ready keeps its own:
// streams may still run there.
func (b *builder) remember(e *discovery.Endpoint, ranks int) []*slot {
	if !b.needs.loads {
		return nil
	}
	var slots []*slot
	if b.old != nil {
		slots = b.old.engines[e.ID]
	}
	if len(slots) > ranks {
		slots = slots[:ranks]
	}
	for r := len(slots); r < ranks; r++ {
		*b.ids++
		s := &slot{id: *b.ids, hash: hashBytes(b.opts.seed+uint64(r), []byte(e.ID))}
		slots = append(slots[:r:r], s)
	}
	b.engines[e.ID] = slots
	return slots
}

// meet finds for each class of the first leg whom its engines can meet.
func (b *builder) meet() {
	groups := map[string][]*class{}
	for _, c := range b.order {
		if len(c.legs[b.first.other()]) > 0 {
			groups[c.key.group] = append(groups[c.key.group], c)
		}
	}
	for _, c := range b.order {
		if len(c.legs[b.first]) == 0 {
			continue
		}
		b.grouped = b.grouped || len(groups[c.key.group]) > 0
		var peers []*target
		for _, other := range groups[c.key.group] {
			p, d := other, c
			if b.first == prefillLeg {
				p, d = c, other
			}
			if !b.opts.compatible(p, d) {
				continue
			}
			for i := range other.legs[b.first.other()] {
				peers = append(peers, &other.legs[b.first.other()][i])
			}
		}
		if len(peers) > 0 {
			c.partners[b.first] = b.list(peersOf, c.key, peers)
		}
	}
}

func (b *builder) list(kind listKind, key classKey, targets []*target) *list {
	name := turnKey{kind, key}
	var turn *atomic.Uint64
	if b.old != nil {
		turn = b.old.turns[name]
	}
	if turn == nil {
		turn = new(atomic.Uint64)
	}
	b.turns[name] = turn
	n := b.needs
	if kind == peersOf {
		n.index = n.indexPeers
	}
	l := newList(byRank(targets), turn, n)
	b.lists = append(b.lists, l)
	if b.needs.loads {
		for i, t := range targets {
			t.slot.next = append(t.slot.next, member{l, int32(i)})
		}
	}
	return l
}

// play decides the trees of a table with the loads of this moment.
func (t *table) play() {
	for _, l := range t.lists {
		if l.tree != nil {
			l.tree.play()
		}
	}
}

// notReady says what is missing.
func (t *table) notReady(in *pdflow.PickInput) error {
	if in.Single && in.Both && len(t.snap.Endpoints) > 0 {
		if t.hasBoth {
			return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "no engine that serves alone is ready"}
		}
		return &pdflow.Error{Code: pdflow.CodeUnsupported, Message: "no engine here serves alone"}
	}
	msg := "no prefill and decode engines of one group are ready"
	switch {
	case t.ready[decodeLeg] == 0 && (in.Single || t.ready[prefillLeg] > 0):
		msg = "no decode engine is ready"
	case t.ready[decodeLeg] == 0:
		msg = "no engine is ready"
	case t.ready[prefillLeg] == 0:
		msg = "no prefill engine is ready"
	case t.grouped:
		msg = "no prefill and decode engines that can exchange KV are ready"
	}
	return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: msg}
}
