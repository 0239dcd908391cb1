// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"
)

// Finish reasons.
const (
	reasonStop   = "stop"
	reasonLength = "length"
	reasonAbort  = "abort"
	reasonError  = "error" // never sent; the answer is an error
)

// generation is one request to the engine core: what all client APIs boil down
// to.
type generation struct {
	id         string // internal
	name       string // the same without its random suffix
	index      int    // of the prompt within the request
	origin     *origin
	prompt     []int32
	maxTokens  int
	minTokens  int
	stop       []string
	stopIDs    []int32
	includeEnd bool // include_stop_str_in_output
	variant    uint64
	children   int
	salt       string
	params     kvParams
	local      bool // compute the prompt here: prompt logprobs are asked for
	mutate     func(map[string]any)
	failLoad   bool
}

// origin is the HTTP request that a generation came with.
type origin struct {
	header http.Header
	path   string
	body   []byte
	stream bool
}

func (g *generation) kvRequest() *kvRequest {
	r := &kvRequest{id: g.id, name: g.name, params: g.params, prompt: g.prompt, index: g.index, local: g.local, max: g.maxTokens}
	if o := g.origin; o != nil {
		r.header, r.path, r.body, r.stream = o.header, o.path, o.body, o.stream
	}
	return r
}

// step is what one token adds to the answer.
type step struct {
	index  int // of the generation, when a request has many
	token  int32
	hasOne bool // false on a last step without a token
	text   string
	reason string // "" but on the last step
	stop   any    // stop_reason
}

// outcome is a finished generation.
type outcome struct {
	tokens  []int32
	text    string
	reason  string
	stop    any
	cached  int // usage's cached_tokens
	created int // usage's created_cache_tokens
	params  any // kv_transfer_params

	members, choice map[string]any // what the connector adds to the answer and to its choice
}

// errLoadFailed is the 500 of a failed KV load under the policy fail.
var errLoadFailed = errors.New("enginesim: KV load failed")

// generate runs one generation to its end; emit, if there is one, sees each step. The error is errLoadFailed,
// errCoreDead, or the cause with which ctx ended. Whatever ends a generation early frees its blocks at once.
func (c *core) generate(ctx context.Context, conn connector, g *generation, emit func(step) error) (*outcome, error) {
	s := &sequence{id: g.id, tokens: append(make([]int32, 0, len(g.prompt)+min(g.maxTokens, 1024)), g.prompt...), prompt: len(g.prompt), salt: g.salt, noCache: g.local}
	t := conn.begin(g.kvRequest())
	c.stats.add(&c.stats.Requests, 1)
	defer c.release(s)

	run := &running{core: c, g: g, s: s, t: t, begun: time.Now(), emit: emit, out: &outcome{}}
	err := run.arrive(ctx)
	if err == nil && run.out.reason == "" {
		err = run.prefill(ctx)
	}
	if err == nil && run.out.reason == "" {
		err = run.decode(ctx)
	}
	run.out.text = run.text.String()
	if errors.Is(err, errTerminated) {
		run.out.reason = reasonAbort
		c.stats.ended(run, reasonAbort)
		return run.out, run.send(step{reason: reasonAbort})
	}
	if err != nil {
		return nil, run.failed(err)
	}
	c.stats.ended(run, run.out.reason)
	s.answer = run.out.tokens
	run.out.params = mutated(t.finished(s, run.out.reason), g.mutate)
	if d, ok := t.(decorator); ok {
		run.out.members, run.out.choice = d.members(s, run.out.reason)
	}
	return run.out, nil
}

// mutated lets a scripted fault change a handoff.
func mutated(params any, mutate func(map[string]any)) any {
	if params == nil || mutate == nil {
		return params
	}
	data, err := json.Marshal(params)
	if err != nil {
		return params
	}
	m := map[string]any{}
	if err := json.Unmarshal(data, &m); err != nil {
		return params
	}
	mutate(m)
	return m
}

// arrive lets the connector end a request before it is scheduled.
func (r *running) arrive(ctx context.Context) error {
	a, ok := r.t.(arrival)
	if !ok {
		return nil
	}
	reason, err := a.arrived(ctx, r.s)
	if err != nil || reason == "" {
		return err
	}
	r.out.reason = reason
	return r.send(step{reason: reason})
}

// failed counts the error of a generation and turns it into one of those that generate documents.
func (r *running) failed(err error) error {
	c := r.core
	var death *engineDeath
	var load *loadError
	switch {
	case errors.As(err, &death):
		c.die()
		return errCoreDead
	case errors.As(err, &load):
		c.stats.ended(r, reasonError)
		return errLoadFailed
	case errors.Is(err, errCoreDead), errors.Is(err, errKilled):
		return err
	}
	c.stats.add(&c.stats.Aborted, 1)
	return err
}

// running is one generation on its way.
type running struct {
	core  *core
	g     *generation
	s     *sequence
	t     transfer
	emit  func(step) error
	out   *outcome
	begun time.Time
	text  strings.Builder

	placed, first time.Time
}

func (r *running) times() timing {
	now := time.Now()
	t := timing{whole: now.Sub(r.begun)}
	if !r.placed.IsZero() {
		t.queued = r.placed.Sub(r.begun)
	}
	if !r.first.IsZero() {
		t.prefill, t.first, t.decode = r.first.Sub(r.placed), r.first.Sub(r.begun), now.Sub(r.first)
	}
	return t
}

// prefill gets the prompt's KV into blocks: from the prefix cache, from another
// engine, or by computing it.
func (r *running) prefill(ctx context.Context) error {
	c, s := r.core, r.s
	if err := c.admit(ctx, s, false, r.t.queued); err != nil {
		r.t.dropped(true)
		return err
	}
	r.placed = time.Now()
	external, promised := r.t.external(), s.prompt
	if p, ok := r.t.(partial); ok && external {
		promised = p.promised(s)
		external = promised > s.computed
	}
	c.stats.scheduled(s, external, promised)
	r.out.cached = s.cached
	if external {
		err := r.load(ctx)
		var failed *loadError
		switch {
		case err == nil:
			r.out.cached = promised
			if cached, told := r.t.reported(); told {
				r.out.cached = cached
			}
		case errors.As(err, &failed):
			c.stats.loadFailed(failed)
			if !c.cfg.Recompute {
				return err
			}
			external = false
		default:
			return err
		}
	}
	if !external || promised < s.prompt {
		from := s.computed
		if !external {
			from = s.cached
		}
		r.out.created = s.prompt/c.blockSize*c.blockSize - from
		if err := r.compute(ctx); err != nil {
			return err
		}
	}
	if !external && c.cfg.MustLoad && !r.g.local {
		c.ledger.computedByConsumer(s.id)
	}
	c.stats.prefilled(s, external, promised)
	if v, ok := r.t.(saver); ok {
		v.prefilled(ctx, s)
	}
	return nil
}

func (r *running) load(ctx context.Context) error {
	if r.g.failLoad {
		r.t.dropped(false) // P's blocks stay until the lease ends (capture 57)
		return &loadError{failures: 1, err: errors.New("scripted")}
	}
	r.core.stats.add(&r.core.stats.loading, 1)
	defer r.core.stats.add(&r.core.stats.loading, -1)
	return r.t.load(ctx, r.s)
}

// compute works out what the sequence misses, at the configured speed.
func (r *running) compute(ctx context.Context) error {
	if rate := r.core.cfg.PrefillRate; rate > 0 {
		missing := len(r.s.tokens) - r.s.computed
		if err := sleep(ctx, time.Duration(float64(missing)/rate*float64(time.Second))); err != nil {
			return err
		}
	}
	r.core.compute(r.s, len(r.s.tokens))
	return ctxErr(ctx)
}

// decode makes token after token.
func (r *running) decode(ctx context.Context) error {
	c, s, g := r.core, r.s, r.g
	text := newStopper(g)
	for {
		if err := ctxErr(ctx); err != nil {
			return err
		}
		if !c.gate.pass() {
			return errKilled
		}
		token := c.model.next(s.digest, g.variant)
		if t, ok := r.t.(teller); ok {
			if told := t.told(); len(told) > len(r.out.tokens) {
				token = told[len(r.out.tokens)]
			}
		}
		now := time.Now()
		if r.first.IsZero() {
			r.first = now
		}
		r.out.tokens = append(r.out.tokens, token)
		c.stats.add(&c.stats.GenerationTokens, 1)
		st := step{token: token, hasOne: true}
		st.text, st.reason, st.stop = text.take(token, len(r.out.tokens))
		if err := r.send(st); err != nil {
			return err
		}
		if st.reason != "" {
			r.out.reason, r.out.stop = st.reason, st.stop
			return nil
		}
		if err := sleep(ctx, c.cfg.ITL); err != nil {
			return err
		}
		if err := r.extend(ctx, token); err != nil {
			return err
		}
	}
}

// extend appends a token and computes its KV. When no block is free, the
// sequence gives up its own, waits in line and starts over.
func (r *running) extend(ctx context.Context, token int32) error {
	core := r.core
	if core.grow(r.s, token) {
		core.compute(r.s, len(r.s.tokens))
		return nil
	}
	core.preempt(r.s)
	r.s.tokens = append(r.s.tokens, token)
	if err := core.admit(ctx, r.s, true, func() {}); err != nil {
		return err
	}
	return r.compute(ctx)
}

func (r *running) send(st step) error {
	r.text.WriteString(st.text)
	if r.emit == nil {
		return nil
	}
	return r.emit(st)
}

// stopper turns tokens into text and watches for the end.
type stopper struct {
	g    *generation
	held string // text that may be the start of a stop string
}

func newStopper(g *generation) *stopper { return &stopper{g: g} }

func (w *stopper) take(token int32, count int) (text, reason string, stop any) {
	piece := detokenise([]int32{token})
	enough := count >= w.g.minTokens
	for _, id := range w.g.stopIDs {
		if enough && id == token {
			return w.flush(""), reasonStop, token
		}
	}
	w.held += piece
	if enough {
		for _, end := range w.g.stop {
			if at := strings.Index(w.held, end); at >= 0 {
				if w.g.includeEnd {
					at += len(end)
				}
				return w.held[:at], reasonStop, end
			}
		}
	}
	if count >= w.g.maxTokens {
		return w.flush(""), reasonLength, nil
	}
	return w.flush(w.maybeStop()), "", nil
}

// flush gives the text that is held, but for the end of it that is kept back.
func (w *stopper) flush(keep string) string {
	text := w.held[:len(w.held)-len(keep)]
	w.held = keep
	return text
}

// maybeStop is the longest end of the text that may begin a stop string.
func (w *stopper) maybeStop() string {
	longest := ""
	for _, end := range w.g.stop {
		for n := min(len(end)-1, len(w.held)); n > len(longest); n-- {
			if strings.HasPrefix(end, w.held[len(w.held)-n:]) {
				longest = w.held[len(w.held)-n:]
				break
			}
		}
	}
	return longest
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func ctxErr(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
