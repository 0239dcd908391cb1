// SPDX-License-Identifier: Apache-2.0

// Package simulate replays a trace of requests over a fleet of modelled engines in virtual time, with the pickers of a
// real flow: it is `pdctl simulate`. The engines are those of enginesim/model, the time is that of enginesim/virtual.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/virtual"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Fleet describes the simulated engines. Those of one role are alike.
type Fleet struct {
	Prefill, Decode         int // engines
	PrefillSpec, DecodeSpec model.Spec
	Zones                   int // the engines are distributed over them by turns

	Link, CrossLink model.Link // within a zone, and between two
	Handshake       time.Duration
}

// UsualFleet has different numbers of prefill and decode engines: with equal numbers round robin would always make the
// same pairs. The engines are 8B models on an H100 each, the links 200 Gbit/s within a zone and a quarter of that
// between zones.
func UsualFleet() Fleet {
	return Fleet{
		Prefill: 4, Decode: 7, PrefillSpec: model.Llama8B(), DecodeSpec: model.Llama8B(), Zones: 2,
		Link:      model.Link{Latency: .001, BytesPerSecond: 20e9},
		CrossLink: model.Link{Latency: .001, BytesPerSecond: 5e9},
		Handshake: 150 * time.Millisecond,
	}
}

func (f *Fleet) check() error {
	if f.Prefill < 1 || f.Decode < 1 || f.Zones < 1 || f.Handshake < 0 {
		return errors.New("both roles need engines, there is a zone at least, and the handshake's time is not below 0")
	}
	return errors.Join(f.PrefillSpec.Validate(), f.DecodeSpec.Validate())
}

// endpoints are the engines' entries: first those that prefill.
func (f *Fleet) endpoints() ([]discovery.Endpoint, error) {
	all := make([]discovery.Endpoint, 0, f.Prefill+f.Decode)
	for i := range f.Prefill + f.Decode {
		role, name := discovery.RolePrefill, "p"+strconv.Itoa(i)
		if i >= f.Prefill {
			role, name = discovery.RoleDecode, "d"+strconv.Itoa(i-f.Prefill)
		}
		e, err := discovery.New("http://"+name+":8000", role)
		if err != nil {
			return nil, err
		}
		e.ID, e.Zone = name, "zone"+strconv.Itoa(i%f.Zones)
		all = append(all, e)
	}
	return all, nil
}

// config is the fleet in virtual time.
func (f *Fleet) config() virtual.Config {
	return virtual.Config{
		Engines: slices.Concat(slices.Repeat([]model.Spec{f.PrefillSpec}, f.Prefill),
			slices.Repeat([]model.Spec{f.DecodeSpec}, f.Decode)),
		Handshake: f.Handshake.Seconds(),
		Link: func(from, to int) model.Link {
			if from%f.Zones != to%f.Zones {
				return f.CrossLink
			}
			return f.Link
		},
	}
}

// Run replays the trace with a policy's picker. The same seed gives the same result.
func Run(ctx context.Context, f Fleet, t *Trace, policy pick.Policy, seed uint64) (*Result, error) {
	return run(ctx, f, t, policy, seed, nil)
}

// run is Run; k is to know what the engines hold, or nil.
func run(ctx context.Context, f Fleet, t *Trace, policy pick.Policy, seed uint64, k *known) (*Result, error) {
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
	r := &replay{ctx: ctx, trace: t, picker: pick.New(set, policy, pick.WithSeed(seed)), places: map[string]int{}}
	for i := range all {
		r.places[all[i].ID] = i
	}
	route := r.route
	if k != nil {
		k.places = r.places
		route = func(f *virtual.Fleet, i int, a *virtual.Arrival) (virtual.Route, error) {
			k.fleet, k.arrival = f, a
			return r.route(f, i, a)
		}
	}
	out, err := virtual.Run(ctx, f.config(), r.arrivals(f.PrefillSpec.BlockSize), route)
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", policy, err)
	}
	return newResult(policy.String(), &f, out), nil
}

// replay asks the picker at each arrival of the trace.
type replay struct {
	ctx    context.Context
	trace  *Trace
	picker pdflow.Picker
	places map[string]int // of engines, by ID
	writer writer
}

// arrivals yields the trace's requests. Keys are computed when a request comes, so that a long trace needs no memory.
func (r *replay) arrivals(blockSize int) func(func(virtual.Arrival) bool) {
	return func(yield func(virtual.Arrival) bool) {
		for i := range r.trace.requests {
			e, at, round := r.trace.at(i)
			keys, tokens := prompt(e, round, blockSize)
			if !yield(virtual.Arrival{At: at, Prompt: tokens, Output: e.Output, Keys: keys}) {
				return
			}
		}
	}
}

func (r *replay) route(_ *virtual.Fleet, i int, _ *virtual.Arrival) (virtual.Route, error) {
	e, _, round := r.trace.at(i)
	request, err := r.writer.request(e, round)
	if err != nil {
		return virtual.Route{}, err
	}
	in := &pdflow.PickInput{Request: request, Attempt: 1}
	if e.Session != "" {
		session := e.Session
		if round > 0 {
			session += "-" + strconv.Itoa(round)
		}
		in.Header = http.Header{"X-Session-Id": {session}}
	}
	return Route(r.ctx, r.picker, r.places, in)
}

// Route asks a picker for a request's pair. places are the engines' places in the fleet, by ID. A request that the
// picker refuses for overload is refused.
func Route(
	ctx context.Context, picker pdflow.Picker, places map[string]int, in *pdflow.PickInput,
) (virtual.Route, error) {
	pair, err := picker.Pick(ctx, in)
	if errors.Is(err, pdflow.CodeOverloaded) {
		return virtual.Route{Refuse: true}, nil
	}
	if err != nil {
		return virtual.Route{}, err
	}
	route := virtual.Route{Decode: places[pair.Decode.ID]}
	if pair.Prefill.URL != nil {
		route.Split, route.Prefill = true, places[pair.Prefill.ID]
	}
	if pair.PrefillDone != nil {
		route.PrefillDone = func() { pair.PrefillDone(nil) }
	}
	if pair.Done != nil {
		route.Done = func() { pair.Done(&pdflow.Outcome{}) }
	}
	return route, nil
}
