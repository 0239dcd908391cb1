// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/internal/live"
	"github.com/pdkit/pdkit/pdflow/internal/telemetry"
)

// serving is one request of a client while it is served, over all its attempts.
type serving struct {
	f      *Flow
	client context.Context // the client's
	life   live.Life       // whose base has the request's span
	tel    telemetry.Request
	call
	tries
	rescue  *rescuer // nil: the stream ends with its decode engine
	racing  *attempt // of a hedged prefill: the first, while the second begins
	untold  *attempt // has failed; observers are told once it is known whether another one follows
	inner   *serving // what this one fell back to, and what fell back itself: see Body.outer
	phase   atomic.Uint32
	current atomic.Pointer[attempt]
	ended   bool
}

// tries are the attempts at one thing, the request or the rest of its stream, and what is known of those that failed.
type tries struct {
	rest       *continuation        // nil: the request itself
	before     int                  // attempts at what came before
	alone      Mode                 // not "": one engine serves, in this mode
	avoid      []string             // IDs of the engines that failed
	again      bool                 // the last attempt is to be retried
	why        string               // it is, or is not
	failure    *Error               // of the last attempt
	holdsRetry bool                 // of the flow's retries
	retryCause live.Cause           // of that
	drew       string               // ID of the first engine that has answered the body with an error
	timedOut   *Error               // of the last attempt that ran out of time and was to be retried elsewhere
	timedOutAt [2]string            // IDs of its engines
	refusal    *Error               // of the last engine that spoke for itself alone
	refusedBy  []string             // IDs of all such engines
	tooShort   int                  // the length of the context of the last engine that refused because of that
	busyUntil  map[string]time.Time // engines that asked to be left alone, by ID
}

// Causes with which pdflow cancels its own contexts; anything else is the client's leaving.
var (
	errPhaseTimeout = errors.New("pdflow: the phase ran out of time")
	errCut          = errors.New("pdflow: cut at shutdown")
	errOver         = errors.New("pdflow: the attempt is over")
)

func newServing(ctx context.Context, f *Flow, c *call) *serving {
	x := &serving{f: f, client: ctx, call: *c}
	if x.sender == nil {
		x.sender = f.sender
	}
	x.tel, ctx = f.tel.Request(ctx, c.req, c.model(), c.id, c.header)
	x.life.Begin(ctx)
	x.rescue = newRescuer(x)
	return x
}

// request is what the attempts of now are to serve.
func (x *serving) request() *connector.ClientRequest {
	if x.rest != nil {
		return x.rest.req
	}
	return x.req
}

// Stop ends the request, whichever of its attempts runs.
func (x *serving) Stop(cause error) { x.life.Stop(cause) }

// run tries pairs until one serves, and then the fallback.
func (x *serving) run() (*Body, *Error) {
	member, e := x.check()
	if e != nil {
		return nil, e
	}
	if x.f.opts.responses != nil && x.req.API == connector.APIResponses {
		return x.atMaker(member)
	}
	return x.serve(member)
}

// serve is run where member is what check returned.
func (x *serving) serve(member string) (*Body, *Error) {
	if member == "" {
		body, e := x.try()
		if e == nil || e.Code != CodeUnsupported || x.given != nil {
			return body, e
		}
		member = e.Param // a describer's word, of this pair
	}
	return x.serveAggregated(member)
}

const unsupportedMessage = "prefill and decode engines cannot carry this together; send the request without it"

// serveAggregated sends a request that two engines cannot carry together to one engine, or refuses it.
func (x *serving) serveAggregated(member string) (*Body, *Error) {
	f := x.f
	x.tel.Unsupported(member)
	if f.opts.unsupported == config.UnsupportedRefuse ||
		x.given != nil && f.checkPick(&Pick{Decode: x.given.Decode}, x.any) != nil {
		return nil, &Error{Code: CodeUnsupported, Connector: f.name, Param: member, Message: unsupportedMessage}
	}
	x.alone = ModeAggregated
	body, e := x.try()
	if e != nil && e.Code == CodeUnsupported { // the picker's word: no engine serves alone
		e.Connector, e.Param, e.Message = f.name, member, unsupportedMessage
	}
	return body, e
}

// try makes attempts until one serves or no further one is allowed, and then falls back.
func (x *serving) try() (*Body, *Error) {
	var last *Error
	for n := 1; ; n++ {
		body, e := x.attempt(n)
		if e == nil {
			x.f.doubts.settle(x.refusedBy, true)
			return body, nil
		}
		last = moreTelling(last, e)
		if !x.again {
			if e.engine != nil && e.engine.status < 500 && !e.proven {
				x.f.doubts.settle(x.refusedBy, false)
			}
			return x.fallback(last)
		}
		if x.why == retryElsewhere { // nobody has too much to do
			continue
		}
		if e := x.backoff(n); e != nil {
			return nil, e
		}
	}
}

// thenDecodesAlone reports whether a failed attempt is followed by one at a decode engine alone.
func (x *serving) thenDecodesAlone(e *Error) bool {
	return x.fallsBack(e) && x.f.opts.fallback == config.FallbackDecode
}

// thenServesAggregated reports whether a pair that cannot carry the request is followed by one engine.
func (x *serving) thenServesAggregated(e *Error) bool {
	return e.Code == CodeUnsupported && x.alone == "" && x.given == nil && x.rest == nil &&
		x.f.opts.unsupported != config.UnsupportedRefuse
}

// fallsBack reports whether a failure may be followed by a fallback.
func (x *serving) fallsBack(e *Error) bool {
	return x.alone == "" && x.given == nil && e.fallbackable()
}

// moreTelling returns the more telling of two failures: that nobody is there for a second attempt hides what failed the
// first.
func moreTelling(last, e *Error) *Error {
	if last != nil && e.nobody() {
		return last
	}
	return e
}

func (x *serving) fallback(last *Error) (*Body, *Error) {
	f := x.f
	if !x.fallsBack(last) || x.life.Context.Err() != nil {
		return nil, last
	}
	switch {
	case f.opts.fallbackFlow != nil && x.rest == nil: // another connector's flow cannot go on with this one's stream
		x.tel.FellBack(codeLabel(last))
		x.mode = ModeFallback
		x.tellLast(true)
		next := x.call
		next.mode = ModeFallback
		if next.sender == f.sender {
			next.sender = nil
		}
		resp, e := f.opts.fallbackFlow.do(x.life.Context, &next)
		if e != nil {
			return nil, moreTelling(last, e)
		}
		x.inner, resp.Body.outer = resp.Body.outer, x
		return resp.Body, nil
	case f.opts.fallback == config.FallbackDecode:
		x.tel.FellBack(codeLabel(last))
		x.alone = ModeFallback
		body, e := x.attempt(f.retry.MaxAttempts + 1 + len(x.refusedBy))
		if e != nil {
			return nil, moreTelling(last, e)
		}
		return body, nil
	}
	return nil, last
}

// check returns the member for which two engines cannot carry the request together, or "". The error refuses the
// request however it would be served.
func (x *serving) check() (member string, e *Error) {
	alone := x.given != nil && x.given.Prefill.URL == nil
	for i, c := range append([]connector.RequestChecker{x.f.rules}, x.f.opts.checkers...) {
		err := c.CheckRequest(x.req)
		unsupported, ok := errors.AsType[*connector.UnsupportedError](err)
		switch {
		case err == nil:
		case !ok:
			e = invalid(err)
			e.Connector = x.f.name
			return "", e
		// another flow's connector may not carry what this one's does
		case i == 0 && !alone:
			member = unsupported.Member
		}
	}
	return member, nil
}

// attempt picks engines and runs the legs once. n counts the attempts at the same thing. On success the body owns the
// attempt and ends it.
func (x *serving) attempt(n int) (*Body, *Error) {
	a, e := x.begin(x.before + n)
	if e != nil {
		return nil, e
	}
	a, body, e := x.runAttempt(a)
	x.giveRetryBack()
	if e != nil {
		x.again, a.out.Retry = a.mayRetry(e)
		a.out.Final = !x.again && !x.thenDecodesAlone(e) && !x.thenServesAggregated(e)
		if x.failure = e; !x.again && a.out.Retry != "" {
			x.tel.NotRetried(a.out.Retry, e.failure())
		}
		x.why, a.again, x.untold = a.out.Retry, x.again, a
		if a.finish(e); a.out.Final {
			x.tellLast(true)
		}
		x.life.Cancel(errOver) // a hedged attempt had a context of its own within it
		x.life.Renew()
		x.heed(e)
		if e.EngineFault() || x.why == retryElsewhere {
			x.avoid = append(x.avoid, a.failed(e)...)
		}
		return nil, e
	}
	return body, nil
}

// tellLast tells how the last attempt ended, unless that was told. final says that no other attempt follows.
func (x *serving) tellLast(final bool) {
	if a := x.untold; a != nil {
		x.untold = nil
		a.tell(final)
	}
}

// begin picks engines for an attempt. It is apart from what runs the legs, since a Pick is large, and each stream keeps
// the stack that its request needed at most.
func (x *serving) begin(n int) (*attempt, *Error) {
	x.phase.Store(phasePick)
	again := x.again
	x.again = false
	var pick Pick
	var e *Error
	if x.rest != nil {
		e = x.rest.pick(x, n, &pick)
	} else {
		e = x.pick(x.life.Context, n, &pick)
	}
	if e == nil {
		e = x.admit(&pick)
	} else if again && e.nobody() {
		x.tel.NotRetried(retryNoPair, x.failure.failure())
	}
	if e != nil {
		return nil, e
	}
	x.tellLast(false)
	if again {
		x.tel.Retried(x.why, x.failure.failure())
	}
	mode := cmp.Or(x.mode, x.alone)
	switch {
	case mode != "":
	case pick.Prefill.URL == nil:
		mode = ModeAggregated
	default:
		mode = ModeDisaggregated
	}
	return newAttempt(x, n, mode, &pick), nil
}

// pick fills p.
func (x *serving) pick(ctx context.Context, n int, p *Pick) *Error {
	if x.given != nil {
		*p = *x.given
		if x.alone != "" {
			p.onlyDecode()
		}
		return nil
	}
	req := x.request()
	in := &PickInput{Request: req, Header: x.header, RequestID: x.id, Attempt: n, Avoid: x.avoid, Single: x.alone != "",
		Pair: x.racing != nil || x.pair && x.alone == "", Prefill: x.prefill, Decode: x.decode, TooShort: x.tooShort}
	if x.f.traits.Ending.PrefillFinishes {
		in.Avoid = slices.Concat(x.avoid, x.f.runningOn.full())
	}
	if x.f.encoder != nil && !in.Single {
		s := &connector.Session{API: req.API, Model: req.Model, RequestID: x.id, Request: req}
		in.Encode = len(x.f.encoder.Items(s))
	}
	if e := x.f.pick(ctx, in, p); e != nil {
		return e
	}
	if in.Single {
		p.onlyDecode() // of a picker that has named more all the same
	}
	var e *Error
	switch {
	case p.Decode.URL == nil:
		e = &Error{Code: CodeInternal, Phase: "pick", Connector: x.f.name, Message: "the picker named no decode engine"}
	case !in.names(p):
		e = &Error{Code: CodeInternal, Phase: "pick", Connector: x.f.name, Message: "the picker named another engine " +
			"than the request does"}
	case x.f.traits.Serving.PrefillPairOnly && p.Decode.Role != discovery.RoleDecode:
		e = &Error{Code: CodeInternal, Phase: "pick", Connector: x.f.name, Message: "the picker named an engine to " +
			"decode that may prefill, and such an engine ends without a decode engine"}
	}
	if e != nil {
		x.decline(p)
	}
	return e
}

// served is how the request is being served, "" before an engine was picked.
func (x *serving) served() Mode {
	if x.mode != "" {
		return x.mode
	}
	if a := x.current.Load(); a != nil {
		return a.out.Mode
	}
	return ""
}

// crashed ends the attempts of a request whose picker, connector or observer panicked. x may be nil.
func (f *Flow) crashed(x *serving, phase string, cause any) *Error {
	e := &Error{Code: CodeInternal, Phase: phase, Connector: f.name, Message: "the gateway failed",
		Err: fmt.Errorf("panic: %v", cause)}
	if x == nil {
		return e
	}
	for _, a := range []*attempt{x.racing, x.current.Load()} {
		if a != nil && !a.ended {
			a.end(e)
		}
	}
	x.racing = nil
	return e
}

// end closes the books of the request. It is called exactly once, by whoever ends it: do on an error, the body's Close
// otherwise.
func (x *serving) end(e *Error) {
	if x.ended {
		return
	}
	x.ended = true
	x.tellLast(true)
	x.life.Cancel(errOver)
	x.giveRetryBack()
	if e != nil && e.mode == "" {
		e.mode = x.served()
	}
	x.recordEnd(e)
	x.log(e)
	x.f.live.Leave(x)
}

// recordEnd records the end of the request.
func (x *serving) recordEnd(e *Error) {
	var u telemetry.Usage
	reason := ""
	if a := x.current.Load(); a != nil {
		reason = a.out.Reason
		if e == nil {
			u = telemetry.Usage(a.out.Usage)
		}
	}
	x.tel.End(string(x.served()), reason, codeLabel(e), u)
}

// log tells failures as warnings, and the rest for debugging only.
func (x *serving) log(e *Error) {
	logger, failed := x.f.opts.telemetry.Logger, e != nil && e.Code != CodeClientGone
	if !logger.Enabled(x.client, slog.LevelDebug) && (!failed || !logger.Enabled(x.client, slog.LevelWarn)) {
		return
	}
	attrs := []slog.Attr{slog.String("request_id", x.id), slog.String("connector", x.f.name),
		slog.String("mode", string(x.served())), slog.Duration("took", time.Since(x.tel.Start))}
	if e != nil {
		attrs = append(attrs, slog.Any("error", e))
	}
	switch {
	case failed:
		logger.LogAttrs(x.client, slog.LevelWarn, "request failed", attrs...)
	case e != nil:
		logger.LogAttrs(x.client, slog.LevelDebug, "client left", attrs...)
	default:
		logger.LogAttrs(x.client, slog.LevelDebug, "request served", attrs...)
	}
}

// whyEnded says why a context ended: a phase's time, a sibling's failure, the shutdown, or the client.
func (f *Flow) whyEnded(ctx context.Context, leg LegKind, phase string) *Error {
	cause := context.Cause(ctx)
	e := &Error{Leg: leg, Phase: phase, Connector: f.name, Err: cause}
	var sibling *Error
	switch {
	case errors.As(cause, &sibling):
		same := *sibling // others hold it too
		return &same
	case errors.Is(cause, errPhaseTimeout):
		e.Code, e.Message = CodeTimeout, "the engines did not answer in time"
	case errors.Is(cause, context.DeadlineExceeded):
		e.Code, e.Message, e.caller = CodeTimeout, "the engines did not answer in the time that the caller gave", true
	case errors.Is(cause, errCut):
		e.Code, e.Message, e.RetryAfter = CodeDraining, "shutting down", time.Second
	case errors.Is(cause, errEnded):
		e.Code, e.Message = CodeClientGone, "the program that sends the legs has ended the request"
	case errors.Is(cause, errForgotten):
		e.Code, e.Message = CodeForgotten, "the program that sends the legs has forgotten the request"
	case errors.Is(cause, errOver):
		e.Code, e.Message = CodeCanceled, "the leg was not needed any more"
	default:
		e.Code, e.Message = CodeClientGone, "the client left"
	}
	return e
}
