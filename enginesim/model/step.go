// SPDX-License-Identifier: Apache-2.0

package model

import "math"

// plan decides what the next step computes, as vLLM does: first one token for each request that decodes and the next
// chunk of those that do not yet, then new requests in the order in which they came, until the budget of tokens, the
// blocks or the places are gone.
func (e *Engine) plan(now float64) {
	e.span, e.batch = span{}, e.batch[:0]
	budget := e.spec.StepTokens
	if budget == 0 {
		budget = math.MaxInt
	}
	lost := false                         // a request has lost its blocks
	for i := 0; i < len(e.running); i++ { //nolint:intrange // preempt shortens it
		r := e.running[i]
		n := min(r.missing(), budget) // above 0: requests begin only while budget is left
		for !e.grow(r, r.computed+n) {
			last := e.running[len(e.running)-1]
			e.preempt(last, now)
			lost = true
			if last == r {
				break
			}
		}
		if r.state != running {
			break
		}
		budget -= n
		e.batch = append(e.batch, share{r, n})
	}
	if !lost {
		e.begin(now, budget)
	}
	e.start(now, !lost)
}

// begin lets requests begin that have come or whose KV has, as far as the budget goes.
func (e *Engine) begin(now float64, budget int) {
	for len(e.ready) > 0 && budget > 0 && e.places() {
		r := e.ready[0]
		e.ready = e.ready[1:]
		budget -= e.run(r, 1)
	}
	began := false
	for len(e.waiting) > 0 && !e.stuck {
		r := e.waiting[0]
		fetch := r.Fetch && !r.again
		if !fetch && (budget <= 0 || !e.places()) {
			break
		}
		hits, idle := e.hits(r)
		from := max(hits*e.spec.BlockSize, r.Cached)
		n := max(r.total()-from, 1)
		from = r.total() - n
		if !fetch && n > budget {
			if e.spec.NoChunks && began {
				break // the first prompt of a step may be longer than its budget: it would never come in otherwise
			}
			if !e.spec.NoChunks {
				n = budget
			}
		}
		if fetch {
			n = r.total() - from
		}
		if !e.blocks.room(e.blocksFor(from+n) - hits + idle) {
			e.stuck = true
			break
		}
		e.take(r, hits, from)
		e.waiting = e.waiting[1:]
		if fetch {
			e.grow(r, r.Prompt)
			r.state = fetching
			e.fetching++
			e.tell(Placed, now, r, n)
			continue
		}
		e.grow(r, from+n)
		budget -= e.run(r, n)
		began = true
	}
	if len(e.waiting) == 0 {
		e.waiting = nil // what is sliced away at the front would stay in memory
	}
}

func (e *Engine) places() bool { return e.spec.MaxRunning == 0 || len(e.running) < e.spec.MaxRunning }

// hits looks a request's tokens up in the prefix cache. One token at least is left to compute.
func (e *Engine) hits(r *Request) (hits, idle int) {
	if e.spec.NoPrefixCache {
		return 0, 0
	}
	return e.blocks.match(r.Keys[:min(len(r.Keys), (r.total()-1)/e.spec.BlockSize)])
}

// take holds the cached blocks of a request.
func (e *Engine) take(r *Request, hits, from int) {
	for _, key := range r.Keys[:hits] {
		id := e.blocks.lookup(key)
		e.blocks.hold(id)
		r.blocks = append(r.blocks, id)
	}
	r.computed, r.known = from, hits
	e.stats.Reused += hits * e.spec.BlockSize
	if !r.again {
		r.reused = from
	}
}

// run puts a request into the step.
func (e *Engine) run(r *Request, n int) int {
	r.state = running
	e.running = append(e.running, r)
	e.batch = append(e.batch, share{r, n})
	return n
}

// preempt takes all blocks away from the request that began last.
func (e *Engine) preempt(r *Request, now float64) {
	e.running = e.running[:len(e.running)-1]
	e.free(r)
	r.state, r.again, r.Cached = waiting, true, 0
	e.waiting = append([]*Request{r}, e.waiting...)
	e.stats.Preemptions++
	e.tell(Preempted, now, r, 0)
}

// start begins the stretch that was planned. alike is false if the step after it is another one in any case.
func (e *Engine) start(now float64, alike bool) {
	if len(e.batch) == 0 {
		return
	}
	load := Load{Requests: len(e.batch)}
	least := math.MaxInt
	for _, s := range e.batch {
		load.ContextTokens += s.r.computed
		if s.r.missing() > 1 {
			load.PrefillTokens += s.n
			load.Attention += s.n*s.r.computed + s.n*(s.n+1)/2
			alike = false
			continue
		}
		least = min(least, s.r.Output-s.r.made)
		alike = alike && s.r.made > 0
	}
	e.span = span{active: true, begin: now, steps: 1, first: e.spec.Seconds(load)}
	if !alike || e.EachStep || len(e.ready) > 0 {
		return
	}
	if e.blocks.bounded { // each request needs a block in so many steps
		least = min(least, 1+e.spec.BlockSize*(e.blocks.free/len(e.batch)))
	}
	e.span.steps, e.span.growth = least, e.spec.PerContextToken*float64(len(e.batch))
}

// finish does what the stretch that has ended computed.
func (e *Engine) finish(at float64) {
	s := e.span
	e.stats.Steps += s.steps
	e.stats.Busy += at - s.begin
	over, tokens := false, 0
	for _, b := range e.batch {
		r := b.r
		if r.state == leaving {
			over = true
			continue
		}
		if r.missing() > 1 || r.made == 0 {
			e.stats.Computed += b.n
		}
		r.computed += b.n
		if s.steps > 1 {
			r.computed += s.steps - 1
			e.grow(r, r.computed) // before any of them ends, so that memory is what it was
		}
		e.remember(r, r.computed)
	}
	for _, b := range e.batch {
		if r := b.r; r.state == running && r.computed-s.steps+1 == r.total() {
			e.token(r, s, at)
			tokens++
			over = over || r.state != running
		}
	}
	for k := 1; k < s.steps; k++ {
		e.Gaps.Add(s.first+float64(k)*s.growth, int64(tokens))
	}
	if !over {
		return
	}
	kept := e.running[:0]
	for _, r := range e.running {
		switch r.state {
		case running:
			kept = append(kept, r)
		case leaving:
			e.free(r)
			r.state = ended
		default:
		}
	}
	clear(e.running[len(kept):])
	e.running = kept
}

// token counts what the stretch has made of a response.
func (e *Engine) token(r *Request, s span, at float64) {
	if r.made == 0 {
		e.tell(First, at, r, 1)
	} else {
		e.Gaps.Add(s.after(1)-r.last, 1)
		if e.EachStep {
			e.tell(Token, at, r, s.steps)
		}
	}
	r.made += s.steps
	r.last = at
	e.stats.Made += s.steps
	if r.made < r.Output {
		return
	}
	e.stats.Ended++
	e.tell(Ended, at, r, r.made)
	if r.Hold {
		r.state = holding
		return
	}
	e.free(r)
	r.state = ended
}
