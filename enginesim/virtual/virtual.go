// SPDX-License-Identifier: Apache-2.0

// Package virtual runs a fleet of engines (package enginesim/model) in virtual time: requests come, a router says which
// engines serve each, and what happens when follows from the engines' model and from the links between them. There is
// no HTTP, no goroutine and no clock: an hour of a fleet takes seconds, and the same input gives the same output.
package virtual

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/pdkit/pdkit/enginesim/model"
)

// Arrival is a request that comes at a time, in seconds from the beginning.
type Arrival struct {
	At             float64
	Prompt, Output int      // tokens; the output is what will be made, which no router can know
	Keys           []uint64 // see model.Request
}

// Route says how a request is served. Engines are named by their place in Config.Engines.
type Route struct {
	Refuse  bool
	Decode  int  // serves the response
	Split   bool // Prefill computes the prompt first, and Decode fetches its KV
	Prefill int

	PrefillDone func() // called when Prefill has computed the prompt; nil allowed
	Done        func() // called when the response has ended, or has failed; nil allowed
}

// Router chooses the route of the arrival with number i, which is 0 for the first. It may look at the fleet's engines
// and must not change them.
type Router func(f *Fleet, i int, a *Arrival) (Route, error)

// Config describes a fleet.
type Config struct {
	Engines []model.Spec
	// Link is the way of KV from one engine to another; nil: it takes no time.
	Link func(from, to int) model.Link
	// Handshake is the time that the first transfer of a pair takes longer, in seconds.
	Handshake float64
}

// Outcome is what became of a request.
type Outcome struct {
	At, First, End  float64 // when it came, and when its first and last token were there
	Prompt, Output  int     // tokens
	Prefill, Decode int     // engines; Prefill is -1 if one engine served it
	Reused          int     // tokens of the prompt that were cached where it was computed
	Fetched         int     // tokens of KV that Decode fetched
	Refused, Failed bool    // by the router; because it fits no engine's memory
}

// Served reports whether the request got its whole response.
func (o *Outcome) Served() bool { return !o.Refused && !o.Failed }

// TTFT is the time to the first token, in seconds.
func (o *Outcome) TTFT() float64 { return o.First - o.At }

// TPOT is the mean time between two tokens of the response, in seconds; 0 for one token.
func (o *Outcome) TPOT() float64 { return (o.End - o.First) / float64(max(o.Output-1, 1)) }

// Result is what a run has shown.
type Result struct {
	Outcomes []Outcome       // in the order of arrival
	Engines  []model.Stats   // in the order of Config.Engines
	Gaps     model.Histogram // between two tokens, of all responses
	Pairs    int             // different pairs that KV went between
	Lasted   float64         // seconds, until the last response ended
}

// Fleet is a fleet while it runs.
type Fleet struct {
	now      float64
	cfg      Config
	engines  []*model.Engine
	out, in  []model.Port
	met      map[[2]int]bool
	flights  []*flight
	queue    events
	versions []int // of each engine's event in the queue; older ones are ignored
	n        int
	result   *Result
}

// flight is a request on its way.
type flight struct {
	route  Route
	a      Arrival
	p, d   *model.Request
	i      int
	loaded bool
}

// Now is the time.
func (f *Fleet) Now() float64 { return f.now }

// Engine is the engine at a place of Config.Engines, for a router to read its load.
func (f *Fleet) Engine(i int) *model.Engine { return f.engines[i] }

// Run lets all arrivals, which are in the order of time, be served. It returns early with an error if the router does,
// if an arrival cannot be, or if ctx ends.
func Run(ctx context.Context, cfg Config, arrivals iter.Seq[Arrival], route Router) (*Result, error) {
	f := &Fleet{cfg: cfg, met: map[[2]int]bool{}, result: &Result{},
		out: make([]model.Port, len(cfg.Engines)), in: make([]model.Port, len(cfg.Engines)),
		versions: make([]int, len(cfg.Engines))}
	for _, spec := range cfg.Engines {
		e, err := model.New(spec)
		if err != nil {
			return nil, err
		}
		f.engines = append(f.engines, e)
	}
	next, stop := iter.Pull(arrivals)
	defer stop()
	a, more := next()
	for steps := 0; more || len(f.queue) > 0; steps++ {
		if steps%1024 == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if more && (len(f.queue) == 0 || a.At < f.queue[0].at) {
			if a.At < f.now {
				return nil, fmt.Errorf("virtual: arrival %d is earlier than the one before it", len(f.flights))
			}
			f.now = a.At
			if err := f.arrive(a, route); err != nil {
				return nil, err
			}
			a, more = next()
			continue
		}
		ev, _ := heap.Pop(&f.queue).(event)
		if ev.flight == nil && ev.version != f.versions[ev.engine] {
			continue
		}
		f.now = ev.at
		if ev.flight != nil {
			f.arrived(ev.flight)
			continue
		}
		if err := f.advance(ev.engine); err != nil {
			return nil, err
		}
	}
	f.result.Pairs, f.result.Lasted = len(f.met), f.now
	for _, e := range f.engines {
		f.result.Engines = append(f.result.Engines, e.Stats())
		f.result.Gaps.Merge(&e.Gaps)
	}
	return f.result, nil
}

// arrive asks the router, and gives the request to the engine that begins.
func (f *Fleet) arrive(a Arrival, route Router) error {
	i := len(f.flights)
	to, err := route(f, i, &a)
	if err != nil {
		return err
	}
	out := Outcome{At: a.At, First: a.At, End: a.At, Prompt: a.Prompt, Output: a.Output, Prefill: -1, Decode: to.Decode,
		Refused: to.Refuse}
	if to.Split {
		out.Prefill = to.Prefill
	}
	f.result.Outcomes = append(f.result.Outcomes, out)
	f.flights = append(f.flights, nil)
	if to.Refuse {
		return nil
	}
	if to.Decode < 0 || to.Decode >= len(f.engines) || to.Split && (to.Prefill < 0 || to.Prefill >= len(f.engines)) {
		return errors.New("virtual: the router names an engine that is not there")
	}
	w := &flight{route: to, a: a, i: i}
	f.flights[i] = w
	if to.Split {
		w.p = &model.Request{ID: i, Prompt: a.Prompt, Output: 1, Keys: a.Keys, Hold: true}
		return f.add(to.Prefill, w, w.p)
	}
	w.d = &model.Request{ID: i, Prompt: a.Prompt, Output: a.Output, Keys: a.Keys}
	return f.add(to.Decode, w, w.d)
}

// add gives a request to an engine. One that the engine can never hold has failed.
func (f *Fleet) add(engine int, w *flight, r *model.Request) error {
	err := f.engines[engine].Add(r, f.now)
	if errors.Is(err, model.ErrTooLong) {
		f.result.Outcomes[w.i].Failed = true
		f.end(w)
		return nil
	}
	f.follow(engine)
	return err
}

// follow plans the event for what an engine does next.
func (f *Fleet) follow(engine int) {
	f.versions[engine]++
	if at, ok := f.engines[engine].Next(); ok {
		f.push(event{at: at, engine: engine, version: f.versions[engine]})
	}
}

// advance lets an engine go on until now.
func (f *Fleet) advance(engine int) error {
	for _, ev := range f.engines[engine].Advance(f.now) {
		w := f.flights[ev.Request.ID]
		if w == nil {
			continue
		}
		out := &f.result.Outcomes[w.i]
		switch {
		case ev.Request == w.p:
			if ev.Kind != model.Ended {
				continue
			}
			out.Reused = w.p.Reused()
			if w.route.PrefillDone != nil {
				w.route.PrefillDone()
			}
			w.d = &model.Request{ID: w.i, Prompt: w.a.Prompt, Output: w.a.Output, Keys: w.a.Keys, Fetch: true}
			if err := f.add(w.route.Decode, w, w.d); err != nil {
				return err
			}
		case ev.Kind == model.Placed:
			out.Fetched = ev.Tokens
			f.transfer(w, ev.Tokens)
		case ev.Kind == model.First:
			out.First = ev.At
			if w.p == nil {
				out.Reused = ev.Request.Reused()
			}
		case ev.Kind == model.Ended:
			out.End = ev.At
			f.end(w)
		}
	}
	f.follow(engine)
	return nil
}

// transfer sends a request's KV.
func (f *Fleet) transfer(w *flight, tokens int) {
	from, to := w.route.Prefill, w.route.Decode
	at := f.now
	if pair := [2]int{from, to}; !f.met[pair] {
		f.met[pair] = true
		at += f.cfg.Handshake
	}
	if f.cfg.Link != nil {
		bytes := float64(tokens) * f.cfg.Engines[from].BytesPerToken
		at += f.cfg.Link(from, to).Transfer(&f.out[from], &f.in[to], bytes, f.now) - f.now
	}
	f.push(event{at: at, flight: w})
}

// arrived goes on when a request's KV is at its decode engine.
func (f *Fleet) arrived(w *flight) {
	w.loaded = true
	f.engines[w.route.Prefill].Release(w.p, f.now)
	f.follow(w.route.Prefill)
	f.engines[w.route.Decode].Loaded(w.d, f.now)
	f.follow(w.route.Decode)
}

// end forgets a request, and whatever P still holds for it.
func (f *Fleet) end(w *flight) {
	f.flights[w.i] = nil
	if w.p != nil && !w.loaded {
		f.engines[w.route.Prefill].Release(w.p, f.now)
		f.follow(w.route.Prefill)
	}
	if w.route.Done != nil {
		w.route.Done()
	}
}

// event is when an engine has something to say, or when a request's KV has come. Of two at the same time the one that
// was planned first comes first.
type event struct {
	at      float64
	n       int
	engine  int
	version int
	flight  *flight
}

func (f *Fleet) push(e event) {
	f.n++
	e.n = f.n
	heap.Push(&f.queue, e)
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].n < e[j].n
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) } //nolint:errcheck // nothing else is pushed
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}
