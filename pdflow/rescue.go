// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"container/list"
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/intake"
	"github.com/pdkit/pdkit/internal/resume"
	"github.com/pdkit/pdkit/pdflow/internal/rescue"
)

// WithRescue lets a stream outlive its decode engine: when that dies, breaks the connection, gives the request up or
// stays silent for longer than Timeouts.Idle in mid-stream, a new pair goes on with the tokens that the client has, and
// the client's stream goes on, no byte repeated and none missing. A request's stream is rescued at most perRequest
// times. Default, and 0: never.
//
// Only greedy streams of chats and completions with one choice are rescued, and only if the engine tells token ids as
// vLLM does (return_token_ids, which the flow asks for and takes out again); docs/reliability/rescue.md has the whole
// list. What is not rescued ends as it does without this option. Streams of [Flow.Begin] are never rescued, since their
// caller sends the legs and has sent the last one, nor are those with a Pick of the caller's, which get one attempt.
//
// A rescued stream costs a second prefill of its prompt; while a stream runs, the flow holds its token ids, 4 bytes
// for each. When a decode engine dies with many streams, a flow sends each prefill engine at most four of them at a
// time, hedged prefills apart. The others wait, if Timeouts.Prefill and Timeouts.Idle are limits, for no longer than
// both together since the stream broke. Rescues are not counted in Retry.Budget; their retries and hedged prefills are.
func WithRescue(perRequest int) Option {
	return optionFunc(func(o *options) error {
		o.rescues = perRequest
		return needs("WithRescue", perRequest >= 0, "a number that is not negative")
	})
}

// rescuing is what a request needs to let its stream go on at another pair.
type rescuing struct {
	plan   *rescue.Plan
	reason string         // not "": why the request allows none
	left   int            // rescues
	from   *resume.Stream // not nil: the stream as it was cut, while another pair is tried
	since  time.Time      // when from was cut
	place  *rescue.Place  // of the current attempt
}

// askTokens asks D for the ids of its tokens, if its stream may be rescued.
func (a *attempt) askTokens(leg *connector.Leg) {
	x := a.x
	if a.f.opts.rescues == 0 || x.sender.steps != nil || x.given != nil || !x.req.Stream {
		return
	}
	if x.rescue == nil {
		x.rescue = &rescuing{left: a.f.opts.rescues}
		x.rescue.plan, x.rescue.reason = rescue.PlanOf(x.req)
	}
	if x.rescue.plan != nil {
		leg.Set("return_token_ids", jsonTrue)
	}
}

// follow returns what keeps the tokens of decode's stream; nil if it cannot be rescued.
func (r *rescuing) follow(a *attempt) *resume.Stream {
	switch {
	case r.plan == nil:
		return nil
	case r.from == nil:
		return resume.New(r.plan.Config(a.failureStop(),
			func(event []byte) { a.x.current.Load().decodeUsage(event) }))
	}
	next, _ := r.from.Next()
	return next
}

// freesWith gives the stream's place to another one when the attempt's prefill leg has served. If the leg has failed,
// the picker is to know first: see serving.attempt.
func (r *rescuing) freesWith(a *attempt) {
	place, tell := r.place, a.prefillDone
	a.prefillDone = func(o *LegOutcome) {
		defer func() {
			if o.Err == nil {
				a.f.rescues.Give(place, false)
			}
		}()
		if tell != nil {
			tell(o)
		}
	}
}

// rescued lets the response go on at another pair after e, and reports whether it does.
func (b *Body) rescued(e *Error) bool {
	x := b.a.x
	r := x.rescue
	if r == nil || !e.EngineFault() || x.life.Base.Err() != nil {
		return false
	}
	reason := r.reason
	tokens := b.s.Resume
	if tokens != nil {
		r.from = tokens
		_, reason = r.from.Next()
	}
	switch {
	case reason == "" && tokens == nil:
		reason = "no_stream"
	case reason == "" && r.left == 0:
		reason = "too_often"
	}
	if reason != "" {
		x.tel.Rescue("refused", reason)
		return false
	}
	r.left--
	if tokens.Over() {
		b.s.Finish()
		x.tel.Rescue("rescued", e.Code.Error())
		return true
	}
	next, failure := b.goOn(e)
	if failure != nil {
		x.tel.Rescue("failed", string(failure.Code))
		return false
	}
	b.a, b.s = next.a, next.s // what the client has seen of b stays as it is
	x.tel.Rescue("rescued", e.Code.Error())
	return true
}

// goOn ends the attempt that failed with e, and asks other pairs to go on.
func (b *Body) goOn(e *Error) (next *Body, failure *Error) {
	old, x := b.a, b.a.x
	defer func() {
		if r := recover(); r != nil { // of a picker, a connector or an observer
			failure = &Error{Code: CodeInternal, Phase: "rescue", Connector: x.f.name, Message: "the gateway failed",
				Err: fmt.Errorf("panic: %v", r)}
			for _, a := range []*attempt{x.racing, x.current.Load()} {
				if a != nil && !a.ended {
					a.end(failure)
				}
			}
			x.racing = nil
		}
	}()
	_, done := old.step(x.life.Base, "rescue", "")
	defer func() { done(failure) }()
	b.drop()
	b.legEnds(e)
	b.recordStream()
	old.out.Final = false
	old.end(e)
	x.avoid = append(x.avoid, old.failed(e)...)
	s, _ := x.rescue.from.Next()
	length := 0
	x.life.Renew()
	if x.rescue.plan.Unlimited() {
		if length, failure = old.contextLength(); failure != nil {
			if x.life.Context.Err() != nil {
				failure = old.f.ended(x.life.Context, LegPrefill, "rescue")
			}
			return nil, failure
		}
	}
	req, err := x.rescue.plan.Request(s, length, old.f.opts.telemetry.Usage)
	if err == nil {
		req, err = contract.Without(req, old.f.traits.Members)
	}
	if err != nil {
		return nil, invalid(err)
	}
	x.req = req
	x.before, x.rescue.since = old.s.Attempt, time.Now()
	for n := 1; ; n++ {
		next, failure = x.attempt(old.s.Attempt+n, ModeDisaggregated)
		if failure == nil {
			break
		}
		if x.again && x.backoff(n) == nil {
			continue
		}
		if !x.thenDecodesAlone(ModeDisaggregated, failure) {
			return nil, failure
		}
		if next, failure = x.attempt(old.s.Attempt+n+1, ModeFallback); failure != nil {
			return nil, failure
		}
		break
	}
	next.a.out.Resumed = s.Tokens()
	x.phase.Store(phaseStream)
	return next, nil
}

// contextLength asks P how many tokens fit into its context.
func (a *attempt) contextLength() (int, *Error) {
	failure := &Error{Code: CodePrefillFailed, Leg: LegPrefill, Phase: "rescue", Connector: a.f.name,
		Endpoint: a.s.Prefill.ID, Message: "the prefill engine does not tell its context length"}
	if a.s.Prefill.URL == nil {
		return 0, failure
	}
	ctx, stop := context.WithTimeout(a.x.life.Context, 2*time.Second)
	defer stop()
	u := a.s.Prefill.URL.JoinPath("/v1/models")
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return 0, failure
	}
	a.x.fillHeader(r.Header, nil)
	resp, err := a.caller(ctx)(r)
	if err != nil {
		return 0, failure
	}
	defer resp.Body.Close()
	body, err := intake.ReadAll(resp.Body, resp.ContentLength, maxErrorBody, nil)
	n := int(gjson.GetBytes(body, "data.0.max_model_len").Int())
	if err != nil || !serves(resp.StatusCode) || n <= 0 {
		return 0, failure
	}
	return n, nil
}

// rescuing reports whether the attempts of now are to go on with a stream.
func (x *serving) rescuing() bool { return x.rescue != nil && x.rescue.from != nil }

// pickForRescue picks engines, and waits until the one that is to prefill has a place. The pick is held meanwhile, so
// that the picker knows what the engine will have to do. Another pick follows if the engine fails, or the list of
// engines has changed when the stream's turn comes.
func (x *serving) pickForRescue(n int, mode Mode, p *Pick) (e *Error) {
	q, r := &x.f.rescues, x.rescue
	for {
		if e = x.pick(x.life.Context, n, mode, p); e != nil {
			return e
		}
		changed := x.f.picker.Changed()
		engine, leg := p.Prefill.ID, x.f.limits.Prefill
		if p.Prefill.URL == nil {
			engine, leg = p.Decode.ID, x.f.limits.Decode
		}
		if r.place.Held(engine) {
			return nil // its turn had come
		}
		q.Give(r.place, false)
		turn := q.Enter(engine)
		placed := turn == nil
		if !placed {
			placed, e = x.awaitTurn(engine, turn, leg)
		}
		if placed {
			r.place = &rescue.Place{Engine: engine}
			if turn == nil {
				return nil
			}
			select {
			case <-changed:
			default:
				return nil
			}
		}
		x.decline(p)
		if e != nil {
			return e
		}
	}
}

// awaitTurn waits until a stream has a place at an engine. It has none and no error if it is to pick again. All its
// waits together take no longer than a leg may take and a response may be silent, if both have limits: by then those
// of the streams that have places have let it try another engine.
func (x *serving) awaitTurn(engine string, turn *list.Element, leg time.Duration) (placed bool, e *Error) {
	var tooLong <-chan time.Time
	if idle := x.f.limits.Idle; leg > 0 && idle > 0 {
		timer := time.NewTimer(leg + idle - time.Since(x.rescue.since))
		defer timer.Stop()
		tooLong = timer.C
	}
	ch, _ := turn.Value.(chan bool)
	select {
	case placed = <-ch:
		return placed, nil
	case <-tooLong:
		e = &Error{Code: CodeOverloaded, Phase: "rescue", Connector: x.f.name, RetryAfter: time.Second,
			Message: "more streams are to be rescued than the engines can prefill"}
	case <-x.life.Context.Done():
		e = x.f.ended(x.life.Context, "", "rescue")
	}
	x.f.rescues.Leave(engine, turn)
	return false, e
}
