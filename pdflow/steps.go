// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/internal/legs"
	"github.com/pdkit/pdkit/pdflow/internal/live"
	"github.com/pdkit/pdkit/transport"
)

// Steps is one request whose legs the caller sends, with a client, a router or an Envoy of its own. [Flow.Begin] makes
// it.
//
// It is driven so: Next gives the next leg; the caller sends it and tells with Done what came of it; and so on, until
// Next gives the response. Two legs that run together come from two calls of Next: the second does not wait for the
// first's end, so a leg is best sent by a goroutine of its own. Retries at other pairs, a fallback and the encode stage
// give further legs, by the same rules as [Flow.Do]: it is the same code, which waits in each leg's place until Done is
// called. End must be called, and ends the request whatever its state.
//
// Methods may be called concurrently.
type Steps struct {
	parked chan *Step
	done   chan struct{} // closed once resp or err is known
	ended  chan struct{} // closed by End
	cancel context.CancelCauseFunc
	f      *Flow
	id     string

	resp *Response
	err  *Error

	renames atomic.Bool
	once    sync.Once
	mu      sync.Mutex
	calls   live.Watchdog // expires when the caller has forgotten the request
	waiting int           // calls of the caller that wait for an engine
	relayed *relayed      // nil before Step.Passed was called
}

// Begin begins a request whose legs the caller sends: see [Steps]. The error is an *[Error]. ctx covers the whole
// request.
//
// [Step.Send] keeps all guarantees of [Flow.Do]. A caller that takes a step's bytes gives up two guards that need a
// hand on the connection: legs that run together are not held until both engines are reached, so that it should send
// both or neither; and a handoff's age is asked when the step is taken, not when decode's connection stands. Side calls
// of a connector's clean-up after End fail, since nobody is there to send them.
func (f *Flow) Begin(ctx context.Context, in *Request) (*Steps, error) {
	c, e := f.read(ctx, in)
	if e != nil {
		return nil, e
	}
	s := &Steps{parked: make(chan *Step), done: make(chan struct{}), ended: make(chan struct{}), f: f,
		id: c.id}
	ctx, s.cancel = context.WithCancelCause(ctx)
	s.calls.Init(forgetting{s}, time.Now())
	s.touch()
	c.sender = &sender{steps: s}
	go func() {
		defer close(s.done)
		if s.resp, s.err = f.do(ctx, &c); s.resp != nil {
			s.resp.Body.steps = s
		} else {
			s.err = s.err.of(in.API)
		}
	}()
	return s, nil
}

// Next returns the next leg to send, else the response, else the request's error. It blocks until there is one of them.
// After End the error says that the request was ended.
// A response whose Body is nil is one that the caller has relayed ([Step.Relay]).
func (s *Steps) Next(ctx context.Context) (*Step, *Response, error) {
	s.wait()
	defer s.waited()
	select {
	case step := <-s.parked:
		return step, nil, nil
	case <-s.done:
		if s.err != nil {
			return nil, nil, s.err
		}
		if s.resp.Body.s == nil {
			r := *s.resp
			r.Body, r.Rename = nil, r.Body.renamer()
			return nil, &r, nil
		}
		return nil, s.resp, nil
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
}

// End ends the request. Before the response is known it cancels the legs that run. After that it closes the response's
// Body: one that was read to its end counts as served, another as a client that left. For a relayed response err says
// how that ended; nil is whole. Further calls do nothing.
func (s *Steps) End(err error) {
	s.once.Do(func() {
		s.calls.Stop()
		defer s.cancel(context.Canceled)
		select {
		case <-s.done:
			if errors.Is(err, errForgotten) {
				s.cancel(err)
			}
		default:
			s.cancel(cmp.Or(err, errEnded))
		}
		close(s.ended) // after the cancel, whose cause is what the legs fail with
		<-s.done
		if s.resp == nil {
			return
		}
		b := s.resp.Body
		b.lockToClose(cmp.Or(err, context.Canceled))
		defer b.mu.Unlock()
		b.hostEnded(err, s.gaveUp())
		b.close()
	})
}

// gaveUp reports whether the engine gave the request up in a response that the caller relays.
func (s *Steps) gaveUp() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.relayed != nil && s.relayed.failed
}

// WriteError writes an error of Next to a client as ServeHTTP would: with the flow's error handler, the request's ID
// and the way it was served.
func (s *Steps) WriteError(w http.ResponseWriter, r *http.Request, err error) {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		e = &Error{Code: CodeInternal, Err: err}
	}
	s.f.writeError(w, r, s.id, e)
}

// forgetting ends a request that its caller has forgotten.
type forgetting struct{ s *Steps }

// Expire ends the request.
func (f forgetting) Expire() { f.s.End(errForgotten) }

// touch notes a call of the caller's.
func (s *Steps) touch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting == 0 {
		s.calls.Limit(s.f.limits.Steps)
	}
}

// wait begins a call that may wait for an engine: until it is over, the caller has forgotten nothing.
func (s *Steps) wait() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting++
	s.calls.Relax()
}

func (s *Steps) waited() {
	s.mu.Lock()
	s.waiting--
	s.mu.Unlock()
	s.touch()
}

// Step is one leg, or a connector's side call, that the caller sends.
type Step struct {
	Leg      LegKind            // "" for a side call
	Endpoint discovery.Endpoint // the engine; the zero value for a side call
	Method   string
	URL      *url.URL
	Header   http.Header // this step's own
	Deadline time.Time   // when the flow gives the leg up; zero: no limit
	Expires  time.Time   // decode: when the handoff is too old to be sent; zero: it does not age

	s      *Steps
	a      *attempt
	o      *LegOutcome // nil for a side call
	ctx    context.Context
	req    *http.Request
	result chan stepResult
	stepState
}

type stepState struct {
	mu     sync.Mutex
	taken  bool
	done   bool // a result was given, or nobody waits for one
	serves bool // the caller relays a response that is no error's
}

type stepResult struct {
	resp *http.Response
	err  error
}

// park gives a leg to the caller and waits for what comes of it.
func (s *Steps) park(ctx context.Context, a *attempt, o *LegOutcome, r *http.Request) (*http.Response, error) {
	step := &Step{Method: r.Method, URL: r.URL, Header: r.Header, Deadline: a.watch.Deadline(),
		s: s, a: a, o: o, ctx: ctx, req: r, result: make(chan stepResult, 1)}
	if o != nil {
		step.Leg, step.Endpoint = o.Leg, a.s.Prefill
		switch o.Leg {
		case LegDecode:
			step.Endpoint, step.Expires = a.s.Decode, a.freshUntil
		case LegEncode:
			i := slices.IndexFunc(a.s.Encode, func(ep discovery.Endpoint) bool { return ep.ID == o.Endpoint })
			step.Endpoint = a.s.Encode[i]
		}
	}
	defer step.giveUp()
	if a.pGiven != nil && step.Leg == LegDecode { // decode's response must not come before prefill was given out
		select {
		case <-a.pGiven:
		case <-ctx.Done():
		}
	}
	select {
	case s.parked <- step:
		if a.pGiven != nil && step.Leg == LegPrefill {
			close(a.pGiven)
		}
	case <-ctx.Done():
		return nil, unsent(context.Cause(ctx))
	case <-s.ended:
		return nil, unsent(errEnded)
	}
	select {
	case got := <-step.result:
		return got.resp, got.err
	case <-ctx.Done():
		if !step.wasTaken() {
			return nil, unsent(context.Cause(ctx))
		}
		return nil, context.Cause(ctx)
	}
}

func unsent(err error) error {
	return &transport.Error{Sent: transport.SentNothing, Kind: transport.KindOther, Err: err}
}

func (st *Step) wasTaken() bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.taken
}

var (
	errEnded     = errors.New("pdflow: the program that sends the legs has ended the request")
	errForgotten = errors.New("pdflow: the caller has made no call on this request for too long")
)

// Context ends when nobody waits for the step's result any more: the request has ended, or a phase ran out of time.
func (st *Step) Context() context.Context { return st.ctx }

// Take takes the step and returns it as a request that ends with the step's Context, for a caller that sends it by
// itself and then calls Done or Relay. A step can be taken once, since engines would read the same handoff twice, and a
// decode leg only before Expires. The error is an *[Error]. If the step was taken before, the first taker goes on.
// [Step.Send] of such a step, however, gives the error as the step's result, which ends the whole request.
//
// Who sends the request must not follow redirects, which would take the prompt to another server: an http.Client needs
// a CheckRedirect that returns http.ErrUseLastResponse. The body is never nil, and cannot be sent twice, so that a
// client that forgets CheckRedirect keeps the prompt. A caller that sends bytes reads it.
func (st *Step) Take() (*http.Request, error) {
	if err := st.claim(); err != nil {
		return nil, err
	}
	if err := st.arrived(); err != nil {
		return nil, err
	}
	st.req.GetBody = nil
	if st.req.Body == nil {
		st.req.Body = http.NoBody
	}
	return st.request(transport.BeforeSend(st.ctx, func(bool) error { return nil })), nil
}

func (st *Step) request(ctx context.Context) *http.Request {
	r := st.req.WithContext(ctx)
	r.Method, r.URL, r.Host, r.Header = st.Method, st.URL, st.URL.Host, st.Header
	return r
}

// Send takes the step, sends it through rt, and calls Done. It blocks until the head of the response is there.
func (st *Step) Send(rt http.RoundTripper) {
	if err := st.claim(); err != nil {
		st.Done(nil, err)
		return
	}
	st.s.wait()
	defer st.s.waited()
	st.Done(newSender(rt).send(st.ctx, st.a, st.o, st.request(st.ctx)))
}

// arrived lets the other leg go out without waiting for this one, whose connection the flow cannot see.
func (st *Step) arrived() error {
	st.a.rendezvous.Arrived(st.side())
	if st.Leg == LegPrefill && st.a.detached.noteSending(true) != nil {
		return st.a.f.whyEnded(st.a.ctx, LegPrefill, "send")
	}
	return nil
}

func (st *Step) side() legs.Side {
	if st.Leg == LegDecode {
		return legs.Decode
	}
	return legs.Prefill
}

func (st *Step) claim() error {
	st.s.touch()
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case st.done || st.ctx.Err() != nil:
		return st.a.f.whyEnded(st.ctx, st.Leg, "send")
	case st.taken:
		return wrongCall("Step", "was taken before: a leg is sent once")
	case !st.Expires.IsZero() && time.Now().After(st.Expires):
		e := st.a.expired()
		st.finish(nil, e)
		return e
	}
	st.taken = true
	return nil
}

// hostFault is a fault of the program that sends the legs.
func hostFault(message string) *Error {
	return &Error{Code: CodeInternal, Phase: "send", Message: message}
}

// Done tells what came of the step: the engine's response, whose body the flow reads and closes, or the error of
// sending, as an http.RoundTripper returns them. Errors of package transport say what was sent; any other counts as
// maybe sent.
func (st *Step) Done(resp *http.Response, err error) {
	st.s.touch()
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case resp == nil:
		if err == nil {
			err = hostFault("Done needs a response or an error")
		}
	case resp.Body == nil:
		resp.Body = http.NoBody
	case resp.Request != nil && resp.Request.Response != nil:
		_ = resp.Body.Close()
		resp, err = nil, hostFault("the client followed an engine's redirect: set its CheckRedirect")
	case st.done || err != nil:
		_ = resp.Body.Close() // nobody waits for it
	default: // the host's own request may outlive the step
		context.AfterFunc(st.ctx, func() { _ = resp.Body.Close() })
	}
	st.finish(resp, err)
}

// finish gives the result. The caller holds the lock.
func (st *Step) finish(resp *http.Response, err error) {
	if st.done {
		return
	}
	st.done = true
	if st.o != nil && err == nil { // the other leg waits no longer for this one
		st.a.rendezvous.Arrived(st.side())
	}
	st.result <- stepResult{resp, err}
}

// giveUp is called when nobody waits any more.
func (st *Step) giveUp() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.done = true
	select {
	case got := <-st.result: // came just now
		if got.resp != nil {
			_ = got.resp.Body.Close()
		}
	default:
	}
}

// Relay tells that decode answered with status, and that the caller passes that response on by itself, so that the flow
// sees nothing more of it until End but what [Step.Passed] tells. It is for hosts, like an Envoy, whose responses go
// another way. While a prefill runs beside decode, Next returns only when that has ended, and the caller passes nothing
// on before. The error is of [CodeUnsupported] for a leg that is not decode, where the connector changes decode's
// response or the flow the model's name in it ([WithModel], unless [Steps.Renames] was called), and where decode's
// response decides whether a prefill follows.
func (st *Step) Relay(status int) error {
	st.s.touch()
	if !st.Relayable() {
		return &Error{Code: CodeUnsupported, Leg: st.Leg, Phase: "response", Connector: st.a.f.name,
			Message: "the flow must read this response: give it to Done"}
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.serves = serves(status)
	st.finish(&http.Response{StatusCode: status, Header: http.Header{}, Body: relayedBody{}}, nil)
	return nil
}

// Relayable reports whether [Step.Relay] may be called, for hosts that must know it before they send the leg.
func (st *Step) Relayable() bool { return st.Leg == LegDecode && st.a.relayable() }

// relayedBody is the body of a response that the caller passes on by itself.
type relayedBody struct{}

func (relayedBody) Read([]byte) (int, error) { return 0, io.EOF }
func (relayedBody) Close() error             { return nil }

// relayable reports whether decode's response may go past the flow.
func (a *attempt) relayable() bool {
	if a.f.order == connector.DecodeFirst && a.p.Load() == nil || a.x.names != nil && !a.x.sender.steps.renames.Load() {
		return false
	}
	return !(a.twoLegs() && a.f.traits.Handoff.FromDecode) &&
		!(a.p.Load() != nil && a.mergesMembers(a.s.Request.Stream)) && a.rewriting(http.StatusOK) == nil
}
