// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sort"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/virtual"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Deciding is how requests are decided on: by the picker that a gateway has, with package decide around it.
type Deciding struct {
	Policy   decide.Policy // nil: the picker alone, which knows engines' loads by pick.WithLoad
	Pick     pick.Policy   // of the picker within
	KV       bool          // Pick is pick.KV instead, with an index that knows what engines hold now
	Class    decide.Class
	Gateways int           // requests come to them by chance, and each knows its own; 0: one
	Lag      time.Duration // how old it is what engines say of their load
	// Wrong is by how much the pickers' idea of the engines' speed is wrong: 0.5 says half as long again for prefill,
	// and half as long for decode.
	Wrong float64

	// What a recording tells of a gateway's set-up; the zero value is one that knows all that there is to know.
	pairsOnly   bool // the connector lets no decode engine serve alone
	approximate bool // of caches they know what was sent, not what engines tell
	unread      bool // they do not read what engines say of their load
	learns      bool // they learn speeds and the link from what requests take, and doubt predictions that are wrong
}

// Decide replays the trace with a decider. The same seed gives the same result.
func Decide(ctx context.Context, f Fleet, t *Trace, by Deciding, seed uint64) (*Result, error) {
	out, err := decidedOn(ctx, f, t, by, seed)
	if err != nil {
		return nil, err
	}
	return newResult("", &f, out), nil
}

func decidedOn(ctx context.Context, f Fleet, t *Trace, by Deciding, seed uint64) (*virtual.Result, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	all, err := f.endpoints()
	if err != nil {
		return nil, err
	}
	set, err := static.NewSet(all...)
	if err != nil {
		return nil, err
	}
	d := &decided{fleet: &f, by: &by, places: map[string]int{}, set: set, seed: seed,
		said: make([][]telling, len(all))}
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"model":"m","prompt":"x","stream":true}`))
	if err != nil {
		return nil, err
	}
	d.session = &connector.Session{Request: r}
	for i := range all {
		d.places[all[i].ID] = i
	}
	d.known.places = d.places
	for range max(by.Gateways, 1) {
		r, err := d.gateway(ctx, t)
		if err != nil {
			return nil, err
		}
		d.gateways = append(d.gateways, r)
	}
	return virtual.Run(ctx, f.config(), d.gateways[0].arrivals(f.PrefillSpec.BlockSize), d.route)
}

// decided is a run with deciders.
type decided struct {
	fleet    *Fleet
	by       *Deciding
	set      *discovery.Set
	seed     uint64
	places   map[string]int
	known    known
	gateways []*replay
	said     [][]telling // by each engine, the last one last

	session *connector.Session
	now     time.Time
	told    time.Time // what engines say has been so since
	entry   *entry    // of the trace, which the arrival is
}

// telling is what an engine says at a time.
type telling struct {
	at time.Time
	g  model.Gauges
}

// gateway makes one gateway's picker.
func (d *decided) gateway(ctx context.Context, t *Trace) (*replay, error) {
	n := d.seed + uint64(len(d.gateways))
	chance := rand.New(rand.NewPCG(n, 2)) //nolint:gosec // the same each time
	policy, options := d.by.Pick, []pick.Option{pick.WithSeed(n)}
	if d.by.KV {
		policy = pick.KV(pick.KVOptions{Index: &d.known, Tokens: &d.known})
	}
	if d.by.Policy == nil {
		protocol, err := nixl.New(nil)
		if err != nil {
			return nil, err
		}
		inner := pick.New(d.set, policy, append(options, pick.WithLoad(d.load),
			pick.WithNow(func() time.Time { return d.now }))...).Bind(protocol, connector.Serving{})
		return &replay{ctx: ctx, trace: t, picker: inner, places: d.places}, nil
	}
	inner := pick.New(d.set, policy, append(options, pick.WithCandidates())...)
	o := &decide.Options{
		Class: func(*pdflow.PickInput) decide.Class { return cmp.Or(d.entry.class, d.by.Class) },
		Tokens: func(*pdflow.PickInput) (int, bool) {
			return d.known.arrival.Prompt, !d.entry.estimated
		},
		Engine:     d.facts,
		TokenBytes: int(d.fleet.PrefillSpec.BytesPerToken),
		Link:       d.fleet.Link.BytesPerSecond,
		ErrorBound: -1,
		Now:        func() time.Time { return d.now },
		Rand:       chance.Uint64,
	}
	if !d.by.approximate {
		o.Cache = d
	}
	if !d.by.unread {
		o.Load = d.load
	}
	if d.by.learns {
		o.Engine, o.TokenBytes, o.Link, o.ErrorBound = nil, 0, 0, 0
	}
	picker, err := decide.New(inner, d.by.Policy, o)
	if err != nil {
		return nil, err
	}
	bound := picker.Bind(nil, connector.Serving{PairOnly: d.by.pairsOnly})
	return &replay{ctx: ctx, trace: t, picker: bound, places: d.places}, nil
}

// facts are an engine's speed and memory, as the gateway takes them to be.
func (d *decided) facts(e *discovery.Endpoint) decide.Facts {
	s := d.fleet.spec(d.places[e.ID])
	slow, fast := 1+d.by.Wrong, 1-d.by.Wrong
	return decide.Facts{
		Speed: decide.Speed{Base: s.Base * fast, PerRequest: s.PerRequest * fast, PerContext: s.PerContextToken * fast,
			PerPrompt: s.PerPrefillToken * slow},
		KVTokens: s.Blocks * s.BlockSize,
	}
}

// spec is that of the engine at a place.
func (f *Fleet) spec(place int) *model.Spec {
	if place < f.Prefill {
		return &f.PrefillSpec
	}
	return &f.DecodeSpec
}

// load is what an engine said of itself a lag ago.
func (d *decided) load(id string) inspect.Load {
	all := d.said[d.places[id]]
	i := sort.Search(len(all), func(i int) bool { return d.now.Sub(all[i].at) < d.by.Lag })
	if i == 0 {
		return inspect.Load{}
	}
	t := &all[i-1]
	return inspect.Load{At: d.now.Add(-d.by.Lag), KVUsage: t.g.KVUsage, Running: t.g.Running, Waiting: t.g.Waiting,
		Fetching: t.g.Fetching}
}

// Match tells package decide which engines have most of the arrival's prompt.
func (d *decided) Match(_ *pdflow.PickInput, found []decide.Cached) int {
	n := 0
	for _, e := range d.set.Load().Endpoints {
		tokens := d.known.fleet.Engine(d.places[e.ID]).Known(d.known.arrival.Keys)
		if tokens == 0 {
			continue
		}
		at := n
		for at > 0 && found[at-1].Tokens < tokens {
			at--
		}
		if at == len(found) {
			continue
		}
		if n < len(found) {
			n++
		}
		copy(found[at+1:n], found[at:n-1])
		found[at] = decide.Cached{Engine: e.ID, Tokens: tokens, Exact: true}
	}
	return n
}

// tell lets the engines say how busy they are. What nobody can hear any more is forgotten.
func (d *decided) tell() {
	for i := range d.said {
		all := d.said[i]
		for len(all) > 1 && d.now.Sub(all[1].at) >= d.by.Lag {
			all = all[1:]
		}
		d.said[i] = append(all, telling{d.told, d.known.fleet.Engine(i).Gauges()})
	}
	d.told = d.now
}

func (d *decided) route(f *virtual.Fleet, i int, a *virtual.Arrival) (virtual.Route, error) {
	d.known.fleet, d.known.arrival, d.now = f, a, at(f.Now())
	d.tell()
	r := d.gateways[mix(uint64(i), d.seed)%uint64(len(d.gateways))]
	e, _, round := r.trace.at(i)
	d.entry = e
	request, err := r.writer.request(e, round)
	if err != nil {
		return virtual.Route{}, err
	}
	got, err := r.picker.Pick(r.ctx, &pdflow.PickInput{Request: request, Attempt: 1})
	if errors.Is(err, pdflow.CodeOverloaded) {
		return virtual.Route{Refuse: true}, nil
	}
	if err != nil {
		return virtual.Route{}, fmt.Errorf("request %d: %w", i, err)
	}
	// What has become of it is told as a flow tells it.
	out := &pdflow.Outcome{Session: d.session, Decode: pdflow.LegOutcome{Start: d.now}}
	to := virtual.Route{Decode: d.places[got.Decode.ID]}
	if got.Prefill.URL != nil {
		to.Split, to.Prefill = true, d.places[got.Prefill.ID]
		to.PrefillDone = func() {
			d.now = at(f.Now())
			out.Prefill = pdflow.LegOutcome{Start: out.Decode.Start, End: d.now}
			out.Decode.Start = d.now
			d.tell()
			got.PrefillDone(&out.Prefill)
		}
	}
	to.Done = func() {
		d.now = at(f.Now())
		d.tell()
		o := f.Outcome(i)
		out.Decode.FirstByte, out.Decode.End, out.Usage.Output = at(o.First), at(o.End), int64(o.Output)
		if o.Failed {
			out.Err = &pdflow.Error{Code: pdflow.CodeDecodeFailed}
		}
		got.Done(out)
	}
	return to, nil
}

// at is a time of the simulation.
func at(seconds float64) time.Time {
	return time.Unix(0, 0).Add(time.Duration(seconds * float64(time.Second)))
}
