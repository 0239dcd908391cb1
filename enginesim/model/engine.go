// SPDX-License-Identifier: Apache-2.0

package model

import (
	"errors"
	"slices"
)

// ErrTooLong is the error for a request that the engine's blocks can never hold.
var ErrTooLong = errors.New("model: the request does not fit the engine's blocks")

// Engine is one engine. Time is what its caller says, and never runs backwards. Its methods must not be called
// concurrently. A stretch of steps in which requests only decode is one event, unless EachStep is set.
type Engine struct {
	// EachStep makes each step an event of its own, with a Token for each request in it.
	EachStep bool
	// Gaps are the times between two tokens of a response, all responses together.
	Gaps Histogram

	spec     Spec
	blocks   *blocks
	waiting  []*Request // the first one came first
	ready    []*Request // whose KV has come
	running  []*Request // in the order in which they began
	batch    []share    // of the stretch under way
	fetching int        // requests whose KV is on its way
	span     span
	stats    Stats

	stuck bool // the first one that waits found no room, and nothing was freed since

	events, spare []Event
}

// share is what a request has of a step.
type share struct {
	r *Request
	n int // tokens that are computed for it
}

// span is a stretch of steps with the same requests.
type span struct {
	active bool
	begin  float64
	steps  int
	first  float64 // seconds of its first step
	growth float64 // seconds that each step takes longer than the one before
}

// after is the time when so many steps have ended.
func (s *span) after(steps int) float64 {
	k := float64(steps)
	return s.begin + k*s.first + s.growth*k*(k-1)/2
}

func (s *span) end() float64 { return s.after(s.steps) }

// New makes an idle engine.
func New(spec Spec) (*Engine, error) {
	if err := spec.Validate(); err != nil {
		return nil, err
	}
	return &Engine{spec: spec, blocks: newBlocks(spec.Blocks)}, nil
}

// Stats gives the counters.
func (e *Engine) Stats() Stats { return e.stats }

// Waiting is the number of requests that have not begun; one whose KV is on its way is not among them.
func (e *Engine) Waiting() int { return len(e.waiting) + len(e.ready) }

// Running is the number of requests that are computed.
func (e *Engine) Running() int { return len(e.running) }

// UsedBlocks is the number of blocks that requests hold; cached ones that nobody holds are free.
func (e *Engine) UsedBlocks() int { return e.blocks.used }

// Known is how many of a prompt's tokens the prefix cache has now, by its keys.
func (e *Engine) Known(keys []uint64) int {
	hits, _ := e.blocks.match(keys)
	return hits * e.spec.BlockSize
}

// Next is when the engine wants to be advanced; ok is false while it has nothing to do.
func (e *Engine) Next() (at float64, ok bool) {
	if len(e.events) > 0 {
		return e.events[0].At, true
	}
	return e.span.end(), e.span.active
}

// Advance lets time pass until now and returns what has happened, in the order of time. The slice is valid until the
// next call of Advance.
func (e *Engine) Advance(now float64) []Event {
	e.advance(now)
	e.events, e.spare = e.spare[:0], e.events
	return e.spare
}

func (e *Engine) advance(now float64) {
	for e.span.active && e.span.end() <= now {
		at := e.span.end()
		e.finish(at)
		e.plan(at)
	}
}

// Add gives the engine a request. The error is ErrTooLong, or says what is wrong with the request.
func (e *Engine) Add(r *Request, now float64) error {
	switch {
	case r.state != unknown || r.Prompt < 1 || r.Output < 1 || r.Cached < 0 || r.Cached > r.Prompt:
		return errors.New("model: the request is not new, or has lengths out of range")
	case e.spec.Blocks > 0 && e.blocksFor(r.Prompt+r.Output-1) > e.spec.Blocks:
		return ErrTooLong
	}
	e.advance(now)
	r.state = waiting
	e.waiting = append(e.waiting, r)
	if len(e.waiting) == 1 {
		e.stuck = false
		e.kick(now)
	}
	return nil
}

// Loaded tells that the KV of a request with Fetch has come.
func (e *Engine) Loaded(r *Request, now float64) {
	e.advance(now)
	if r.state != fetching {
		return
	}
	e.fetching--
	e.stats.Fetched += r.Prompt - r.computed
	r.computed = r.Prompt - 1 // the last token is computed here: the response begins from it
	r.state = waiting
	e.remember(r, r.Prompt)
	e.ready = append(e.ready, r)
	e.kick(now)
}

// Release lets go of the blocks that a request with Hold has kept.
func (e *Engine) Release(r *Request, now float64) {
	e.advance(now)
	if r.state != holding {
		return
	}
	e.free(r)
	r.state = ended
	if len(e.waiting) > 0 {
		e.kick(now)
	}
}

// Remove ends a request, wherever it is: its client has left. A step that runs is not interrupted.
func (e *Engine) Remove(r *Request, now float64) {
	e.advance(now)
	is := func(x *Request) bool { return x == r }
	switch r.state {
	case waiting, fetching, holding:
		if r.state == fetching {
			e.fetching--
		}
		e.waiting = slices.DeleteFunc(e.waiting, is)
		e.ready = slices.DeleteFunc(e.ready, is)
		e.free(r)
		r.state = ended
		e.stuck = false
	case running:
		r.state = leaving
	default:
		return
	}
	e.kick(now)
}

// kick lets what has changed at now take part in the next step: an engine that decodes ends its stretch with the step
// that runs.
func (e *Engine) kick(now float64) {
	s := &e.span
	if !s.active {
		e.plan(now)
		return
	}
	if s.steps == 1 {
		return
	}
	low, high := 1, s.steps // the first step that ends at now or later
	for low < high {
		if middle := (low + high) / 2; s.after(middle) >= now {
			high = middle
		} else {
			low = middle + 1
		}
	}
	s.steps = low
}

func (e *Engine) tell(k Kind, at float64, r *Request, tokens int) {
	e.events = append(e.events, Event{k, at, r, tokens})
}

func (e *Engine) blocksFor(tokens int) int { return (tokens + e.spec.BlockSize - 1) / e.spec.BlockSize }

// grow gives a request blocks for so many tokens, and reports whether there was room.
func (e *Engine) grow(r *Request, tokens int) bool {
	need := e.blocksFor(tokens) - len(r.blocks)
	if need > 0 && !e.blocks.room(need) {
		return false
	}
	for range need {
		r.blocks = append(r.blocks, e.blocks.take())
	}
	e.stats.PeakBlocks = max(e.stats.PeakBlocks, e.blocks.used)
	return true
}

func (e *Engine) free(r *Request) {
	e.blocks.release(r.blocks)
	r.blocks, r.computed, r.known = nil, 0, 0
	e.stuck = false
}

// remember puts the full blocks of a request's first tokens into the prefix cache.
func (e *Engine) remember(r *Request, tokens int) {
	if e.spec.NoPrefixCache {
		return
	}
	for full := min(tokens/e.spec.BlockSize, len(r.Keys)); r.known < full; r.known++ {
		e.blocks.remember(r.blocks[r.known], r.Keys[r.known])
	}
}
