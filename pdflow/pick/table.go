// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"encoding/binary"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// table is what a picker derives from one snapshot. It is made once per snapshot, so that the time of a pick does not
// depend on the number of endpoints.
type table struct {
	snap    *discovery.Snapshot
	all     *part
	models  map[string]*part // with ByModel, else nil
	unknown *part            // with ByModel: for a model that no engine is known to serve
	// Engines that have loaded an adapter, by its name: their attribute adapters tells.
	adapters map[string]*part
	lists    []*list // the lists of all parts, with those of partners
	joined   bool    // its lists count loads
	tellers  *tellers
}

// part holds the engines that can serve some requests: all engines, or those of one model.
type part struct {
	listed    int   // endpoints, ready or not
	pairs     *list // ready engines of the leg that the policy chooses first, each with at least one possible partner
	singles   *list // decode engines
	boths     *list // engines of role both
	decodes   *list // decode engines that cannot prefill
	hasBoth   bool  // there is an engine of role both, ready or not
	encodes   []*discovery.Endpoint
	positions map[positionKey]*atomic.Uint64
	ready     [2]int // ready engines of each leg
	tellers   *tellers
	unfit     int // ready engines that the connector cannot use
	contexts  [2]contexts
	nearest   gap // if there are no pairs: the greatest gap between two engines of one group
}

// positionKey identifies a list, so that the list of the next snapshot goes on at the same position.
type positionKey struct {
	kind     listKind
	classKey // for a list of peers: the first class that has these peers
}

type listKind byte

const (
	ofPairs listKind = iota
	ofSingles
	ofBoths
	ofDecodes
	peersOf
)

// ranksMost is the largest number of ranks behind a URL that become targets, since a wrong attribute must not cost
// memory. For a larger one, the connector's sessions choose ranks.
const ranksMost = 1024

// ranksOf returns how many targets an endpoint has, and which rank of the whole engine the first one is.
func ranksOf(e *discovery.Endpoint) (n, start int) {
	if ranks, err := attr.RanksOf(*e); err == nil && ranks.Local <= ranksMost {
		return ranks.Local, ranks.Start
	}
	return 1, 0
}

// newTable makes the table of a snapshot by a picker's rules. old is the picker's last table, nil for its first.
func newTable(snap *discovery.Snapshot, old *table, s *state, rules *pairing) *table {
	t := &table{snap: snap}
	if s.opts.load != nil && s.policy.needs.loads {
		t.tellers = newTellers(snap, &s.known)
	}
	build := func(endpoints []*discovery.Endpoint, was *part) *part {
		b := &builder{part: &part{listed: len(endpoints), tellers: t.tellers,
			positions: map[positionKey]*atomic.Uint64{}}, was: was,
			table: t, pairing: rules, needs: s.policy.needs, first: s.policy.first, known: &s.known,
			classes: map[classKey]*class{}}
		return b.build(endpoints)
	}
	if old == nil {
		old = &table{}
	}
	all := make([]*discovery.Endpoint, len(snap.Endpoints))
	models := map[string][]*discovery.Endpoint{}
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		if all[i] = e; s.opts.byModel {
			models[e.Model] = append(models[e.Model], e)
		}
	}
	t.all = build(all, old.all)
	t.adapters = map[string]*part{}
	loaded := loadedBy(all)
	for _, name := range slices.Sorted(maps.Keys(loaded)) {
		t.adapters[name] = build(loaded[name], old.adapters[name])
	}
	if !s.opts.byModel {
		return t
	}
	some := func(endpoints []*discovery.Endpoint, was *part) *part {
		if len(endpoints) == len(all) { // all endpoints have the same model
			return t.all
		}
		return build(endpoints, was)
	}
	unknown := models[""]
	delete(models, "")
	t.unknown, t.models = some(unknown, old.unknown), make(map[string]*part, len(models))
	for _, name := range slices.Sorted(maps.Keys(models)) {
		t.models[name] = some(append(models[name], unknown...), old.models[name])
	}
	return t
}

// adaptersMost is how many adapters get lists of their own: engines could tell any number of names.
const adaptersMost = 1024

// loadedBy returns the engines that have loaded an adapter, by its name, and the encode engines of their model, which
// know no adapters.
func loadedBy(endpoints []*discovery.Endpoint) map[string][]*discovery.Endpoint {
	loaded := map[string][]*discovery.Endpoint{}
	var encoders []*discovery.Endpoint
	for _, e := range endpoints {
		if e.Role.Has(discovery.RoleEncode) {
			encoders = append(encoders, e)
		}
		for name := range adaptersOf(e) {
			if have, known := loaded[name]; known && have[len(have)-1] == e || !known && len(loaded) == adaptersMost {
				continue
			}
			loaded[name] = append(loaded[name], e)
		}
	}
	for name, all := range loaded {
		for _, e := range encoders {
			same := func(x *discovery.Endpoint) bool { return x.Model == e.Model }
			if e.Model == "" || slices.ContainsFunc(all, same) {
				loaded[name] = append(loaded[name], e)
			}
		}
	}
	return loaded
}

// loaded returns the engines that have loaded the adapter that a request names; nil if they cannot serve it.
func (t *table) loaded(in *pdflow.PickInput, serving connector.Serving) *part {
	if in.Request == nil || len(t.adapters) == 0 {
		return nil
	}
	p := t.adapters[in.Request.Model]
	if p == nil {
		return nil
	}
	if l, _ := p.candidates(in, serving); len(l.targets) == 0 {
		return nil
	}
	return p
}

// part returns the engines that can serve a request.
func (t *table) part(in *pdflow.PickInput) *part {
	if t.models == nil || in.Request == nil || in.Request.Model == "" {
		return t.all
	}
	if p := t.models[in.Request.Model]; p != nil {
		return p
	}
	return t.unknown
}

// join makes the table's lists count loads from now on, beside those of all other tables in use.
func (t *table) join() {
	t.joined = true
	for _, l := range t.lists {
		l.join()
	}
	for _, l := range t.lists { // build the trees from the loads of this moment
		if l.tree != nil {
			l.tree.play()
		}
	}
}

// leave stops what join started.
func (t *table) leave() {
	if !t.joined {
		return
	}
	for _, l := range t.lists {
		l.leave()
	}
}

// builder makes a part of a table.
type builder struct {
	*part
	was     *part // this part of the last table, nil if there was none
	table   *table
	pairing *pairing
	needs   needs
	first   leg
	known   *registry
	alone   []*target // targets of engines that are in no pair
	classes map[classKey]*class
	order   []*class // in the order of their first engines, so that the same snapshot always gives the same table
	key     []byte   // a buffer
}

func (b *builder) build(endpoints []*discovery.Endpoint) *part {
	for _, e := range endpoints {
		b.endpoint(e)
	}
	b.meet()
	var pairs, singles, boths []*target
	for _, c := range b.order {
		for i := range c.legs[b.first] {
			t := &c.legs[b.first][i]
			if t.peers = c.partners; t.peers != nil {
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
	for _, t := range b.alone {
		if singles = append(singles, t); t.endpoint.Role.Has(discovery.RoleBoth) {
			boths = append(boths, t)
		}
	}
	b.pairs = b.list(ofPairs, classKey{}, pairs)
	if b.singles = b.pairs; b.first != decodeLeg || len(singles) != len(pairs) {
		b.singles = b.list(ofSingles, classKey{}, singles)
	}
	if b.boths = b.singles; len(boths) != len(singles) {
		b.boths = b.list(ofBoths, classKey{}, boths)
	}
	if b.decodes = b.singles; len(boths) > 0 {
		b.decodes = b.list(ofDecodes, classKey{}, slices.DeleteFunc(slices.Clone(singles), func(t *target) bool {
			return t.endpoint.Role.Has(discovery.RolePrefill)
		}))
	}
	return b.part
}

// endpoint puts an endpoint into its class.
func (b *builder) endpoint(e *discovery.Endpoint) {
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
	slots := b.known.slots[e.ID]
	unfit := b.pairing.unfit(e)
	if unfit {
		b.unfit++
	}
	// An engine of role both that runs without the connector is in no pair. A decode engine in no pair may serve alone.
	if unfit || both && b.pairing.serving.PairOnly {
		if e.Role.Has(discovery.RoleDecode) {
			for _, t := range targets(e, decodeLeg, slots) {
				b.alone = append(b.alone, &t)
			}
		}
		return
	}
	c := b.class(e)
	for side, role := range [2]discovery.Role{discovery.RolePrefill, discovery.RoleDecode} {
		if !e.Role.Has(role) {
			continue
		}
		b.ready[side]++
		b.contexts[side].add(contextOf(e))
		c.legs[side] = append(c.legs[side], targets(e, leg(side), slots)...)
	}
}

func (b *builder) class(e *discovery.Endpoint) *class {
	version := e.Version
	if b.pairing.anyVersion {
		version = ""
	}
	b.key = b.pairing.attributes(b.key[:0], e)
	c := b.classes[classKey{e.Group, e.Model, version, string(b.key)}]
	if c == nil {
		c = &class{key: classKey{e.Group, e.Model, version, string(b.key)}, number: uint64(len(b.order)), sample: e}
		b.classes[c.key] = c
		b.order = append(b.order, c)
	}
	return c
}

// targets returns an endpoint's targets for one leg, one per rank.
func targets(e *discovery.Endpoint, side leg, slots []*slot) []target {
	ranks, start := ranksOf(e)
	list, context := make([]target, ranks), int64(contextOf(e))
	for r := range list {
		list[r] = target{endpoint: e, rank: int32(r), start: int32(start), leg: side, context: context}
		if ranks == 1 {
			list[r].rank = -1
		}
		if slots != nil {
			list[r].slot = slots[r]
		}
	}
	return list
}

// meet finds the possible partners of each class of the first leg.
func (b *builder) meet() {
	groups := map[string][]*class{}
	for _, c := range b.order {
		if len(c.legs[b.first.other()]) > 0 {
			groups[c.key.group] = append(groups[c.key.group], c)
		}
	}
	lists := map[string]*list{} // by the classes in them, so that classes with the same partners share a list
	for _, c := range b.order {
		if len(c.legs[b.first]) == 0 {
			continue
		}
		b.key = b.key[:0]
		var others []*class
		for _, other := range groups[c.key.group] {
			p, d := other, c
			if b.first == prefillLeg {
				p, d = c, other
			}
			g := b.pairing.gap(p.sample, d.sample)
			if b.nearest = max(b.nearest, g); g == gapNone {
				others, b.key = append(others, other), binary.AppendUvarint(b.key, other.number)
			}
		}
		if len(others) == 0 {
			continue
		}
		l := lists[string(b.key)]
		if l == nil {
			l = b.list(peersOf, c.key, b.peers(others))
			lists[string(b.key)] = l
		}
		c.partners = l
	}
}

// peers returns the targets that these classes have for the leg that is chosen second.
func (b *builder) peers(classes []*class) []*target {
	var peers []*target
	for _, c := range classes {
		for i := range c.legs[b.first.other()] {
			peers = append(peers, &c.legs[b.first.other()][i])
		}
	}
	return peers
}

func (b *builder) list(kind listKind, key classKey, targets []*target) *list {
	name := positionKey{kind, key}
	var position *atomic.Uint64
	if b.was != nil {
		position = b.was.positions[name]
	}
	if position == nil {
		position = new(atomic.Uint64)
	}
	b.positions[name] = position
	n := b.needs
	if kind == peersOf {
		n.index = n.indexPeers
	}
	l := newList(byRank(targets), position, n)
	b.table.lists = append(b.table.lists, l)
	return l
}

// notReady returns an error that says what is missing, without names of engines.
func (t *table) notReady(in *pdflow.PickInput, who *pairing) error {
	if err := t.notNamed(in, who); err != nil {
		return err
	}
	p := t.part(in)
	var msg string
	switch {
	case p.listed == 0 && len(t.snap.Endpoints) > 0:
		msg = "no engine here serves the model"
	case in.Single && who.serving.PairOnly && p.hasBoth:
		msg = "no engine that serves alone is ready"
	case in.Single && who.serving.PairOnly && p.listed > 0:
		return &pdflow.Error{Code: pdflow.CodeUnsupported, Message: "no engine here serves alone"}
	case p.unfit > 0 && !in.Single:
		msg = "no engines are ready whose entries have the attributes that the connector needs"
	case in.Single && who.serving.PrefillPairOnly,
		p.ready[decodeLeg] == 0 && (in.Single || p.ready[prefillLeg] > 0):
		msg = "no decode engine is ready"
	case p.ready[decodeLeg] == 0:
		msg = "no engine is ready"
	case p.ready[prefillLeg] == 0:
		msg = "no prefill engine is ready"
	default:
		msg = who.tell(p.nearest)
	}
	return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: msg}
}
