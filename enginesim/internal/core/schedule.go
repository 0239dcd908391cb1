// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/python"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/pace"
)

// Finish reasons.
const (
	ReasonStop   = "stop"
	ReasonLength = "length"
	reasonAbort  = "abort"
	reasonError  = "error" // never sent; the response is an error
)

// Generation is one request to the engine core. Every client API turns its requests into generations.
type Generation struct {
	ID   string // internal
	Name string // the same without its random suffix: cmpl-<X-Request-Id>-0
	Origin
	Prompt     []int32
	MaxTokens  int
	MinTokens  int
	Stop       []string
	StopIDs    []int32
	IncludeEnd bool // include_stop_str_in_output
	Variant    uint64
	Children   int
	Salt       string
	Params     Params
	Local      bool // compute the prompt here, whatever Params say: prompt logprobs are asked for
	Mutate     func(map[string]any)
	FailLoad   bool
	Ending     string // the response ends so after EndAfter tokens, or at its end if that comes before
	EndAfter   int
	HangLoad   bool // the KV that comes from another engine never does
	Corrupt    bool // flip a bit of the KV that is handed off, or that comes from another engine
	// Guide, if it is not nil, gives the token in place of the one that the model would make, and TokenEOS at the end.
	Guide func(free int32) int32
}

// Origin is the HTTP request that a generation came with.
type Origin struct {
	Header http.Header
	Path   string
	Body   []byte
}

// Member is a member of the request's JSON beside kv_transfer_params, nil when it is absent or null.
func (o *Origin) Member(name string) json.RawMessage {
	var members map[string]json.RawMessage
	if json.Unmarshal(o.Body, &members) != nil || string(members[name]) == "null" {
		return nil
	}
	return members[name]
}

// Step is what one token adds to the response.
type Step struct {
	Index  int // of the generation, when a request has many
	Token  int32
	HasOne bool // false on a last step without a token
	Text   string
	Reason string // "" but on the last step
	Stop   any    // stop_reason
	Params any    // kv_transfer_params, on the last step of an engine that streams them
}

// Outcome is a finished generation.
type Outcome struct {
	Tokens  []int32
	Text    string
	Reason  string
	Stop    any
	Cached  int // usage's cached_tokens
	Created int // usage's created_cache_tokens
	Params  any // kv_transfer_params

	Members, Choice python.Object // what the connector adds to the response and to its choice
}

// ErrLoadFailed is the 500 of a failed KV load under the policy fail.
var ErrLoadFailed = errors.New("enginesim: KV load failed")

// Generate runs one generation to its end, and calls emit, unless it is nil, with each step. The error is
// ErrLoadFailed, ErrCoreDead, or the cause with which ctx ended. A generation that ends early frees its blocks at once.
func (c *Core) Generate(ctx context.Context, conn Connector, g *Generation, emit func(Step) error) (*Outcome, error) {
	s := &Sequence{ID: g.ID, Tokens: append(make([]int32, 0, len(g.Prompt)+min(g.MaxTokens, 1024)), g.Prompt...),
		Prompt: len(g.Prompt), salt: g.Salt, noCache: g.Local, corrupt: g.Corrupt}
	t := conn.Begin(g)
	c.Stats.Add(&c.Stats.Requests, 1)
	defer c.release(s)

	run := &running{core: c, g: g, s: s, t: t, begun: time.Now(), emit: emit, out: &Outcome{}}
	defer func() { run.turn.Leave() }()
	err := run.arrive(ctx)
	if err == nil && run.out.Reason == "" {
		err = run.prefill(ctx)
	}
	if err == nil && run.out.Reason == "" {
		err = run.decode(ctx)
	}
	run.out.Text = run.text.String()
	if errors.Is(err, ErrTerminated) {
		run.out.Reason = reasonAbort
		c.Stats.ended(run, reasonAbort)
		return run.out, run.send(Step{Reason: reasonAbort})
	}
	if err != nil {
		return nil, run.failed(err)
	}
	c.Stats.ended(run, run.out.Reason)
	s.Output = run.out.Tokens
	run.out.Params = mutated(t.Finished(s, run.out.Reason), g.Mutate)
	if d, ok := t.(decorator); ok {
		run.out.Members, run.out.Choice = d.Members(s, run.out.Reason)
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
	a, ok := r.t.(Arrival)
	if !ok {
		return nil
	}
	reason, err := a.Arrived(ctx, r.s)
	if err != nil || reason == "" {
		return err
	}
	r.out.Reason = reason
	return r.send(Step{Reason: reason})
}

// failed counts a generation's error and turns it into one of those that Generate documents.
func (r *running) failed(err error) error {
	c := r.core
	var death *Death
	var load *LoadError
	switch {
	case errors.As(err, &death):
		c.Die()
		return ErrCoreDead
	case errors.As(err, &load):
		c.Stats.ended(r, reasonError)
		return ErrLoadFailed
	case errors.Is(err, ErrCoreDead), errors.Is(err, ErrKilled):
		return err
	}
	c.Stats.Add(&c.Stats.Aborted, 1)
	return err
}

// running is one generation while it runs.
type running struct {
	core  *Core
	g     *Generation
	s     *Sequence
	t     Transfer
	emit  func(Step) error
	out   *Outcome
	begun time.Time
	text  strings.Builder
	turn  *pace.Turn // in the engine's steps; nil without Config.Timing

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

// prefill gets the prompt's KV into blocks: from the prefix cache, from another engine, or by computing it.
func (r *running) prefill(ctx context.Context) error {
	c, s := r.core, r.s
	if err := c.admit(ctx, s, false, r.t.Queued); err != nil {
		r.t.Dropped(true)
		return err
	}
	r.placed = time.Now()
	external, promised := r.t.External(), s.Prompt
	if p, ok := r.t.(Partial); ok && external {
		promised = p.Promised(s)
		external = promised > s.Computed
	}
	c.Stats.scheduled(s, external, promised)
	r.out.Cached = s.Cached
	if external {
		err := r.load(ctx)
		var failed *LoadError
		switch {
		case err == nil:
			r.out.Cached = promised
			if cached, told := r.t.Reported(); told {
				r.out.Cached = cached
			}
		case errors.As(err, &failed):
			c.Stats.loadFailed(failed)
			if !c.cfg.Recompute {
				return err
			}
			external = false
		default:
			return err
		}
	}
	if external && promised >= s.Prompt {
		if err := r.step(ctx); err != nil {
			return err
		}
	}
	if !external || promised < s.Prompt {
		from := s.Computed
		if !external {
			from = s.Cached
		}
		r.out.Created = s.Prompt/c.BlockSize*c.BlockSize - from
		if err := r.compute(ctx); err != nil {
			return err
		}
	}
	if !external && c.cfg.MustLoad && !r.g.Local {
		c.Ledger.ComputedByConsumer(s.ID)
	}
	if r.g.Corrupt && !external {
		c.corrupt(s)
	}
	c.Stats.prefilled(s, external, promised)
	if v, ok := r.t.(Saver); ok {
		v.Prefilled(ctx, s)
	}
	return nil
}

func (r *running) load(ctx context.Context) error {
	if r.g.FailLoad {
		r.t.Dropped(false) // P's blocks stay until the lease ends (docs/protocols/nixl.md, recording 57)
		return &LoadError{Failures: 1, Err: errors.New("scripted")}
	}
	r.core.Stats.Add(&r.core.Stats.loading, 1)
	defer r.core.Stats.Add(&r.core.Stats.loading, -1)
	if r.g.HangLoad {
		<-ctx.Done()
		r.t.Dropped(false)
		return ctxErr(ctx)
	}
	before := r.s.Computed
	err := r.t.Load(ctx, r.s)
	if p := r.core.pace; p != nil && err == nil {
		err = p.Fetch(ctx, r.s.Computed-before)
	}
	return err
}

// step takes the time of the engine's steps until the next token, if there is a Config.Timing.
func (r *running) step(ctx context.Context) error {
	p := r.core.pace
	if p == nil {
		return nil
	}
	r.turn.Leave() // it was preempted
	turn, err := p.Join(&model.Request{Prompt: len(r.s.Tokens), Cached: r.s.Computed,
		Output: max(r.g.MaxTokens-len(r.out.Tokens), 1)})
	if err != nil {
		return err
	}
	r.turn = turn
	return turn.Token(ctx)
}

// compute works out what the sequence misses, at the configured speed.
func (r *running) compute(ctx context.Context) error {
	if err := r.step(ctx); err != nil {
		return err
	}
	if rate := r.core.cfg.PrefillRate; rate > 0 {
		missing := len(r.s.Tokens) - r.s.Computed
		if err := Sleep(ctx, time.Duration(float64(missing)/rate*float64(time.Second))); err != nil {
			return err
		}
	}
	r.core.compute(r.s, len(r.s.Tokens))
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
		if !c.Gate.Pass() {
			return ErrKilled
		}
		if g.Ending != "" && len(r.out.Tokens) == g.EndAfter {
			r.out.Reason = g.Ending
			return r.send(Step{Reason: g.Ending})
		}
		token := c.model.next(s.digest, g.Variant)
		if g.Guide != nil {
			token = g.Guide(token)
		}
		if t, ok := r.t.(teller); ok {
			if told := t.Told(); len(told) > len(r.out.Tokens) {
				token = told[len(r.out.Tokens)]
			}
		}
		now := time.Now()
		if r.first.IsZero() {
			r.first = now
		}
		r.out.Tokens = append(r.out.Tokens, token)
		c.Stats.Add(&c.Stats.GenerationTokens, 1)
		st := Step{Token: token, HasOne: true}
		st.Text, st.Reason, st.Stop = text.take(token, len(r.out.Tokens))
		if st.Reason != "" && g.Ending != "" {
			st.Reason, st.Stop = g.Ending, nil
		}
		if err := r.send(st); err != nil {
			return err
		}
		if st.Reason != "" {
			r.out.Reason, r.out.Stop = st.Reason, st.Stop
			return nil
		}
		if r.turn != nil {
			if err := r.turn.Token(ctx); err != nil {
				return err
			}
		}
		if err := Sleep(ctx, c.cfg.ITL); err != nil {
			return err
		}
		if err := r.extend(ctx, token); err != nil {
			return err
		}
	}
}

// extend appends a token and computes its KV. When no block is free, the sequence gives up its own blocks, waits in
// line and starts over.
func (r *running) extend(ctx context.Context, token int32) error {
	core := r.core
	if core.grow(r.s, token) {
		core.compute(r.s, len(r.s.Tokens))
		return nil
	}
	core.preempt(r.s)
	r.s.Tokens = append(r.s.Tokens, token)
	if err := core.admit(ctx, r.s, true, func() {}); err != nil {
		return err
	}
	return r.compute(ctx)
}

func (r *running) send(st Step) error {
	r.text.WriteString(st.Text)
	if r.emit == nil {
		return nil
	}
	return r.emit(st)
}

// stopper turns tokens into text and watches for the end. Like vLLM 0.32.0 (vllm/v1/engine/detokenizer.py) it holds
// back as many characters as the longest stop string has, less one, whatever they are.
type stopper struct {
	g     *Generation
	text  string
	sent  int // bytes of text
	reach int // length of the longest stop string, less one
}

func newStopper(g *Generation) *stopper {
	w := &stopper{g: g}
	for _, end := range g.Stop {
		w.reach = max(w.reach, len(end)-1)
	}
	return w
}

func (w *stopper) take(token int32, count int) (text, reason string, stop any) {
	if token == TokenEOS {
		return w.upTo(len(w.text)), ReasonStop, nil
	}
	piece := Detokenise([]int32{token})
	enough := count >= w.g.MinTokens
	for _, id := range w.g.StopIDs {
		if enough && id == token {
			return w.upTo(len(w.text)), ReasonStop, token
		}
	}
	w.text += piece
	searched := max(0, len(w.text)-len(piece)-w.reach)
	for _, end := range w.g.Stop {
		if at := strings.Index(w.text[searched:], end); enough && at >= 0 {
			if at += searched; w.g.IncludeEnd {
				at += len(end)
			}
			return w.upTo(at), ReasonStop, end
		}
	}
	if count >= w.g.MaxTokens {
		return w.upTo(len(w.text)), ReasonLength, nil
	}
	if w.g.IncludeEnd {
		return w.upTo(len(w.text)), "", nil
	}
	return w.upTo(len(w.text) - w.reach), "", nil
}

// upTo returns the text that was not returned yet, up to a place.
func (w *stopper) upTo(end int) string {
	from := w.sent
	w.sent = max(from, end)
	return w.text[from:w.sent]
}

// Sleep waits for d, or until ctx ends.
func Sleep(ctx context.Context, d time.Duration) error {
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
