// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"errors"
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
// stays silent in mid-stream for longer than Timeouts.Idle without being well, or than Timeouts.Silence, a new pair
// goes on with the tokens that the client has, and the client's stream goes on, no byte repeated and none missing. A
// request's stream is rescued at most perRequest times. Default, and 0: never.
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
		o.maxRescues = perRequest
		return needs("WithRescue", perRequest >= 0, "a number that is not negative")
	})
}

// rescuer is a layer between the Body of a stream and its attempts: it notes the tokens that pass, and has other pairs
// make the rest when the decode engine has failed. A nil rescuer leaves the stream to its decode engine.
//
// The flow asks it when it makes D's leg (ask), when it opens D's stream (follow) and when that has broken (takeOver).
// The attempts that follow are picked by the continuation, which waits for its turn, and serve what it says.
type rescuer struct {
	x      *serving
	plan   *rescue.Plan
	reason string // not "": why the request allows no rescue
	left   int    // rescues
}

// continuation is the rest of a stream whose decode engine has failed: what attempts are made for in a rescue.
type continuation struct {
	req    *connector.ClientRequest
	broken *resume.Stream // the stream up to where it broke
	since  time.Time      // when that was
	place  *rescue.Place  // of the current attempt
}

func newRescuer(x *serving) *rescuer {
	if x.f.opts.maxRescues == 0 || x.sender.steps != nil || x.given != nil || !x.req.Stream {
		return nil
	}
	r := &rescuer{x: x, left: x.f.opts.maxRescues}
	r.plan, r.reason = rescue.PlanOf(x.req)
	return r
}

// ask asks D for the ids of its tokens.
func (r *rescuer) ask(leg *connector.Leg) {
	if r != nil && r.plan != nil {
		leg.Set("return_token_ids", jsonTrue)
	}
}

// follow returns what keeps the tokens of a stream of D's; nil if it cannot be rescued.
func (r *rescuer) follow(a *attempt) *resume.Stream {
	switch {
	case r == nil || r.plan == nil:
		return nil
	case r.x.rest == nil:
		return resume.New(r.plan.Config(a.failureStop(), func(event []byte) { r.x.current.Load().decodeUsage(event) }))
	}
	next, _ := r.x.rest.broken.Next()
	return next
}

// givenTokens is how many tokens of the output stand in the prompt of the rest of a stream, 0 for any other request.
func (x *serving) givenTokens() int64 {
	if x.rest == nil {
		return 0
	}
	next, _ := x.rest.broken.Next()
	if next == nil {
		return 0
	}
	return int64(next.Given())
}

// takeOver lets a response go on at another pair after e, and reports whether it does.
func (r *rescuer) takeOver(b *Body, e *Error) bool {
	if r == nil || !e.EngineFault() || r.x.life.Base.Err() != nil {
		return false
	}
	tell, reason := r.x.tel.Rescue, r.reason
	tokens := b.s.Resume
	if tokens != nil {
		_, reason = tokens.Next()
	}
	switch {
	case reason != "":
	case tokens == nil:
		reason = "no_stream"
	case r.left == 0:
		reason = "too_often"
	}
	if reason != "" {
		tell("refused", reason)
		return false
	}
	r.left--
	if tokens.Over() {
		b.s.Finish()
	} else {
		next, failure := r.goOn(b, tokens, e)
		if failure != nil {
			tell("failed", string(failure.Code))
			return false
		}
		b.a, b.s = next.a, next.s // what the client has seen of b stays as it is
	}
	tell("rescued", e.Code.Error())
	return true
}

// goOn ends the attempt that failed with e, and asks other pairs for the rest of its stream.
func (r *rescuer) goOn(b *Body, broken *resume.Stream, e *Error) (next *Body, failure *Error) {
	old, x := b.a, r.x
	defer func() {
		if cause := recover(); cause != nil { // of a picker, a connector or an observer
			failure = x.f.crashed(x, "rescue", cause)
		}
	}()
	_, done := old.span(x.life.Base, "rescue", nil, "")
	defer func() { done(failure) }()
	b.discard(e)
	b.recordStream()
	old.out.Final = false
	old.finish(e)
	x.untold = old
	x.life.Renew()
	req, failure := r.restOf(old, broken)
	if failure != nil {
		return nil, failure
	}
	rest := &continuation{req: req, broken: broken, since: time.Now()}
	defer func() {
		if q := &x.f.rescueQueue; next != nil { // one engine serves alone, whose first event is here
			q.Served(rest.place)
		} else { // a picker has panicked while no pick had the place
			q.Give(rest.place)
		}
	}()
	x.tries = tries{rest: rest, before: old.s.Attempt, avoid: append(x.avoid, old.failed(e)...),
		timedOut: x.timedOut, timedOutAt: x.timedOutAt, busyUntil: x.busyUntil} // what is known of engines
	next, failure = x.try()
	if failure != nil {
		return nil, failure
	}
	next.a.out.Resumed = broken.Tokens()
	x.phase.Store(phaseStream)
	return next, nil
}

// restOf makes the request for the rest of a stream, of which old was the last attempt.
func (r *rescuer) restOf(old *attempt, broken *resume.Stream) (req *connector.ClientRequest, e *Error) {
	length := 0
	if r.plan.Unlimited() {
		length, e = old.contextLength()
		switch {
		case e != nil && r.x.life.Context.Err() != nil:
			return nil, r.x.f.whyEnded(r.x.life.Context, LegPrefill, "rescue")
		case e != nil:
			return nil, e
		}
	}
	s, _ := broken.Next()
	req, err := r.plan.Request(s, length, r.x.f.opts.telemetry.Usage)
	if err == nil {
		req, err = contract.Without(req, r.x.f.traits.Members)
	}
	if err != nil {
		return nil, invalid(err)
	}
	return req, nil
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

// pick picks engines, and waits until the one that is to prefill has a place. The pick is held meanwhile, so that the
// picker knows what the engine will have to do. Another pick follows if the engine fails, or the list of engines has
// changed when the stream's turn comes. All waits together take no longer than a leg may take and a response may be
// silent, if both have limits: by then those of the streams that have places have let it try another engine.
func (c *continuation) pick(x *serving, n int, p *Pick) *Error {
	q := &x.f.rescueQueue
	for {
		if e := x.pick(x.life.Context, n, p); e != nil {
			return e
		}
		changed := x.f.picker.Changed()
		engine, leg := p.Prefill.ID, x.f.limits.Prefill
		if p.Prefill.URL == nil {
			engine, leg = p.Decode.ID, x.f.limits.Decode
		}
		if c.place.Held(engine) { // its turn had come
			c.keepPlace(q, p)
			return nil
		}
		q.Give(c.place)
		var until time.Time
		if idle := x.f.limits.Idle; leg > 0 && idle > 0 {
			until = c.since.Add(leg + idle)
		}
		place, waited, err := q.Take(x.life.Context, engine, until)
		if c.place = place; place != nil {
			stale := false
			select {
			case <-changed:
				stale = waited
			default:
			}
			if !stale {
				c.keepPlace(q, p)
				return nil
			}
		}
		x.decline(p)
		switch {
		case errors.Is(err, rescue.ErrTooLong):
			return &Error{Code: CodeOverloaded, Phase: "rescue", Connector: x.f.name, RetryAfter: time.Second,
				Message: "more streams are to be rescued than the engines can prefill"}
		case err != nil:
			return x.f.whyEnded(x.life.Context, "", "rescue")
		}
	}
}

// keepPlace gives the place to another stream when the pick's prefill leg has served, or when its attempt has ended. If
// that has failed, the picker is to know first, since those that wait may pick again.
func (c *continuation) keepPlace(q *rescue.Queue, p *Pick) {
	place, done, prefillDone := c.place, p.Done, p.PrefillDone
	p.PrefillDone = func(o *LegOutcome) {
		defer func() {
			if o.Err == nil {
				q.Served(place)
			}
		}()
		if prefillDone != nil {
			prefillDone(o)
		}
	}
	p.Done = func(o *Outcome) {
		defer func() {
			if o.Err != nil && o.Err.EngineFault() && o.Err.Endpoint == place.Engine {
				q.Failed(place)
			} else {
				q.Give(place)
			}
		}()
		if done != nil {
			done(o)
		}
	}
}
