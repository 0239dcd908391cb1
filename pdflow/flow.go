// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/modelname"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/pdflow/internal/live"
	"github.com/pdkit/pdkit/pdflow/internal/rescue"
	"github.com/pdkit/pdkit/pdflow/internal/telemetry"
	"github.com/pdkit/pdkit/transport"
)

// version is the version that is released next, or that a tag has. See built for the one that is told.
const version = "0.1.0"

// Flow runs requests over pairs of engines with one connector. It is an http.Handler. Make it with [New].
type Flow struct {
	protocol
	abilities
	picker Picker // bound to the connector's rules
	opts   options
	limits config.Timeouts // in effect
	retry  config.Retry    // in effect

	sender  *sender              // of requests that bring none of their own
	owned   *transport.Transport // made by New, closed by Shutdown
	tel     *telemetry.Instruments
	handler handler
	warned  sync.Map // by the types of writers that lack a method: see warnOfWriter
	start   start
	inFlight
}

// protocol is what the connector declares.
type protocol struct {
	conn     connector.KVConnector
	rules    *check.Rules
	traits   connector.Traits // of rules
	name     string
	order    connector.Order
	withheld *sse.Member // of D's responses

	foreignSeen atomic.Bool // a response of D's had members that only P can know, and P's had not
}

// abilities are those of the connector; nil: it has not that one.
type abilities struct {
	starter  connector.Starter
	preparer connector.Preparer
	expecter connector.Expecter
	finisher connector.Finisher
	rewriter connector.Rewriter
	encoder  connector.Encoder
	cleaner  connector.Cleaner
	cold     connector.ColdDetector
	checker  connector.PrefillChecker
}

// start is the connector's, once.
type start struct {
	mu   sync.Mutex
	done bool
}

// inFlight is what runs, and what bounds it.
type inFlight struct {
	live        live.Set[*serving]
	runningOn   runningOn
	retries     *live.Retries
	rescueQueue rescue.Queue
	probes      live.Probes // of engines that are silent
	pairProbes  live.Probes // of pairs whose response is no stream, and late
	further     further
	doubts      doubts
}

// New makes a flow, and binds the picker to the connector's rules. The error says which option or ability is missing.
func New(c connector.KVConnector, p Picker, opts ...Option) (*Flow, error) {
	if c == nil || p == nil {
		return nil, errors.New("pdflow: New needs a connector and a picker")
	}
	f := &Flow{}
	f.conn, f.rules = c, check.Of(c)
	f.traits = f.rules.Traits
	f.runningOn.most = maxRunningOn
	f.name, f.order, f.withheld = f.traits.Name, f.traits.Order, withheldMember(&f.traits)
	f.opts = options{pickWait: 250 * time.Millisecond, telemetry: silent}
	if err := f.opts.take(opts); err != nil {
		return nil, err
	}
	if err := f.findAbilities(); err != nil {
		return nil, err
	}
	if f.picker = p.Bind(c, f.traits.Serving); f.picker == nil {
		return nil, fmt.Errorf("pdflow: %T.Bind returned nil: it must return a picker, or itself", p)
	}
	f.opts.forward = slices.DeleteFunc(f.opts.forward, func(name string) bool {
		return strings.EqualFold(name, f.traits.Handoff.Header) // a client's own is believed no more than a member
	})
	f.limits, f.retry = f.opts.timeouts.Or(f.traits.Timeouts).Resolve(f.traits.Handoff.Lease),
		f.opts.retry.Or(f.traits.Retry).Resolve()
	f.retries = live.NewRetries(f.retry.Budget)
	if f.opts.transport == nil {
		f.owned = transport.New(nil)
		f.opts.transport = f.owned
	}
	f.sender = newSender(f.opts.transport)
	var err error
	if f.tel, err = newTelemetry(f); err != nil {
		return nil, fmt.Errorf("pdflow: %w", err)
	}
	refusals, err := newRefusals(f.opts.telemetry.MeterProvider, f.opts.telemetry.Logger, f.opts.observers,
		append([]attribute.KeyValue{attribute.String("pd.connector", f.name)}, f.opts.telemetry.Attributes...)...)
	if err != nil {
		return nil, fmt.Errorf("pdflow: %w", err)
	}
	f.handler = handler{maxBody: cmp.Or(f.opts.maxBody, defaultMaxBody), budget: f.opts.budget, refusals: refusals,
		bodyTimeout: f.limits.Body, writeTimeout: f.limits.Write, onError: sendError, requestID: f.opts.requestID,
		find: func(*connector.ClientRequest, string) (*Flow, *Error) { return f, nil }}
	if f.opts.errorHandler != nil {
		f.handler.onError = f.opts.errorHandler
	}
	f.tellOfReady()
	return f, nil
}

func (f *Flow) findAbilities() error {
	if err := contract.CheckTraits(&f.traits); err != nil {
		return fmt.Errorf("pdflow: connector %T: %w", f.conn, err)
	}
	f.starter, _ = connector.As[connector.Starter](f.conn)
	f.preparer, _ = connector.As[connector.Preparer](f.conn)
	f.expecter, _ = connector.As[connector.Expecter](f.conn)
	f.finisher, _ = connector.As[connector.Finisher](f.conn)
	f.rewriter, _ = connector.As[connector.Rewriter](f.conn)
	f.encoder, _ = connector.As[connector.Encoder](f.conn)
	f.cleaner, _ = connector.As[connector.Cleaner](f.conn)
	f.cold, _ = connector.As[connector.ColdDetector](f.conn)
	f.checker, _ = connector.As[connector.PrefillChecker](f.conn)
	if f.traits.Serving.PairOnly && f.opts.fallback == config.FallbackDecode {
		return fmt.Errorf("pdflow: a decode engine of connector %s cannot serve alone: use FallbackError, or a "+
			"fallback to another flow", f.name)
	}
	switch f.order {
	case connector.PrefillThenDecode, connector.Together:
	case connector.DecodeFirst:
		if f.cold == nil {
			return fmt.Errorf("pdflow: connector %s decodes first, so it must be a connector.ColdDetector", f.name)
		}
	case connector.DecodeThenPrefill:
		if f.expecter == nil {
			return fmt.Errorf("pdflow: connector %s prefills on decode's event, so it must be a connector.Expecter",
				f.name)
		}
	default:
		return fmt.Errorf("pdflow: connector %s has an unknown order", f.name)
	}
	return nil
}

// Connector returns the flow's connector.
func (f *Flow) Connector() connector.KVConnector { return f.conn }

// HandoffLimit returns the age above which a handoff is not sent to decode, 0 for none.
func (f *Flow) HandoffLimit() time.Duration { return max(f.limits.Handoff, 0) }

// Start starts the connector's listeners, if it has any. The first request does it too; a gateway calls Start to fail
// early.
func (f *Flow) Start(ctx context.Context) error {
	if f.starter == nil {
		return nil
	}
	f.start.mu.Lock()
	defer f.start.mu.Unlock()
	if f.start.done {
		return nil
	}
	// Not the first client's context: what is started outlives its request.
	if err := f.starter.Start(context.WithoutCancel(ctx)); err != nil {
		return &Error{Code: CodeInternal, Phase: "start", Connector: f.name, Message: "failed to start", Err: err}
	}
	f.start.done = true
	return nil
}

// HealthCheck asks the connector's own parts, if it has any that can fail.
func (f *Flow) HealthCheck(ctx context.Context) error {
	if h, ok := connector.As[connector.HealthChecker](f.conn); ok {
		return h.HealthCheck(ctx)
	}
	return nil
}

// Request is a client's request, for [Flow.Do] and [Flow.Begin].
type Request struct {
	API       connector.API
	Header    http.Header // the client's; nil allowed
	Body      []byte      // one JSON object; not changed, and not kept after the response has ended
	RequestID string      // "": see ID
	Pick      *Pick       // a pair that the caller has chosen: the picker is not asked, and there is one attempt
	AnyPair   bool        // Pick need not keep the connector's rules about pairs and entries, PrefillPairOnly apart
	Pair      bool        // two engines are to serve it if they can: no picker decides otherwise. See [PickInput]

	// Instead of Pick: the ID of an engine of the picker's set that is to prefill, or to decode. The picker chooses the
	// other engine, by its rules. Retries, hedges, rescues and the fallback keep the named engine, which may be asked
	// again after a failure, and vary the other. Where one engine serves the whole request, Prefill says nothing.
	// The error is of CodeNoEndpoint where the engine is listed and not ready, and of CodeNotFound where it is not
	// listed. See [PickInput].
	Prefill, Decode string
}

// Response is the client's response, from [Flow.Do], [Steps.Next] and the hosts that are built on them. Body must be
// closed, which [Response.Send] does; closing it before its end cancels the legs that still run.
type Response struct {
	Status int
	// Content-Type and what else a client needs; Content-Length only of a response that is not streamed
	Header    http.Header
	Body      *Body
	Mode      Mode
	RequestID string

	// Rename, of a response that the caller relays, makes of each piece of its body what the client gets, with the name
	// by which the client asked for the model and with the flow's words for an engine's error. last is true with the
	// last piece, which may be empty. What Rename returns is valid until its next call and may be empty, since it holds
	// back an event, or a response that is no stream, until that is whole. After an error the caller cuts the response.
	// The client gets no Content-Length. One goroutine may call it. Nil: nothing is to be changed. See [Steps.Renames].
	Rename func(piece []byte, last bool) ([]byte, error)
}

// Do runs a request and returns once the response's first event is known. The error is an *[Error]. The context covers
// the response's body too.
func (f *Flow) Do(ctx context.Context, in *Request) (*Response, error) {
	c, e := f.read(ctx, in)
	if e != nil {
		return nil, e
	}
	resp, e := f.do(ctx, &c)
	if e != nil {
		return nil, e.of(in.API)
	}
	return resp, nil
}

// call is one request on its way through a flow.
type call struct {
	req    *connector.ClientRequest
	asked  string           // the model that the client has named, where engines got another name
	names  *modelname.Names // what the response is named by; nil: by what engines say
	header http.Header      // the client's
	id     string
	given  *Pick    // not nil: the caller has chosen the engines
	any    bool     // given need not keep the connector's rules
	pair   bool     // two engines are to serve it
	mode   Mode     // not "": another flow fell back to this one
	sender *sender  // nil: the flow's own
	held   *holding // the body, in the budget; nil: it is not counted

	prefill, decode string // IDs of engines that are chosen, while the picker chooses the others: see PickInput
}

// read checks a caller's request.
func (f *Flow) read(ctx context.Context, in *Request) (call, *Error) {
	if in == nil {
		return call{}, wrongCall("Request", "must not be nil")
	}
	c, e := f.callOf(in)
	if e != nil {
		refused := Refusal{API: in.API}
		if validRequestID(in.RequestID) {
			refused.RequestID = in.RequestID
		}
		f.handler.refusals.tell(ctx, refused, e)
	}
	return c, e
}

func (f *Flow) callOf(in *Request) (call, *Error) {
	if in.API == connector.APIUnknown {
		return call{}, &Error{Code: CodeNotFound, Param: "API", Message: "this path is none of connector.APIs"}
	}
	req, err := connector.ParseRequest(in.API, in.Body)
	if err != nil {
		return call{}, invalid(err).of(in.API)
	}
	c := call{req: req, header: in.Header, id: in.ID(), given: in.Pick, any: in.AnyPair, pair: in.Pair,
		prefill: in.Prefill, decode: in.Decode}
	if in.RequestID != "" && !validRequestID(in.RequestID) {
		return call{}, wrongCall("RequestID", "must be 1 to 128 letters, digits or -_.:").of(in.API)
	}
	if c.given != nil && (c.prefill != "" || c.decode != "") {
		return call{}, wrongCall("Pick", "must be nil where Prefill or Decode names an engine")
	}
	if c.given != nil && c.given.Decode.URL == nil {
		return call{}, wrongCall("Pick", "must name a decode engine with a URL; a Pick without Prefill is served by "+
			"Decode alone")
	}
	if c.given != nil {
		if err := f.checkPick(c.given, c.any); err != nil {
			e := wrongCall("Pick", "these engines cannot serve together")
			if p, ok := errors.AsType[*check.PairError](err); ok {
				e.Message += ": their " + p.By + " does not fit"
			}
			e.Err = err // which names engines, and so is not for clients
			return call{}, e
		}
	}
	return c, nil
}

// checkPick holds a given pair to what a picker holds its own to, or, with anyPair, to what keeps engines alive.
func (f *Flow) checkPick(p *Pick, anyPair bool) error {
	if f.traits.Serving.PrefillPairOnly && p.Decode.Role != discovery.RoleDecode {
		return errors.New("an engine of this protocol that may prefill must not decode: name one of role decode")
	}
	if anyPair {
		return nil
	}
	if p.Prefill.URL != nil {
		return f.rules.CheckPair(p.Prefill, p.Decode)
	}
	if f.traits.Serving.PairOnly && !p.Decode.Role.Has(discovery.RoleBoth) {
		return errors.New("a decode engine of this protocol cannot serve alone: name a prefill engine, or an engine " +
			"of role both")
	}
	return nil
}

// wrongCall is a caller's mistake.
func wrongCall(param, message string) *Error {
	return &Error{Code: CodeInvalid, Param: param, Message: message}
}

func invalid(err error) *Error {
	e := &Error{Code: CodeInvalid, Message: err.Error(), Err: err}
	if r, ok := errors.AsType[*connector.RequestError](err); ok {
		e.Param, e.Message = r.Param, r.Message
	}
	return e
}

// do runs one parsed request. It does not keep c.
func (f *Flow) do(ctx context.Context, c *call) (resp *Response, e *Error) {
	var x *serving
	defer func() {
		// of a picker, a connector or an observer: this request's failure, and nobody else's
		if r := recover(); r != nil {
			if resp, e = nil, f.crashed(x, "run", r); x != nil {
				x.end(e)
			}
		}
	}()
	if err := f.Start(ctx); err != nil {
		return nil, f.refuse(ctx, c, err)
	}
	req, err := contract.Without(c.req, f.traits.Members) // a flow that falls back to this one has stripped its own
	if err != nil {
		return nil, f.refuse(ctx, c, err)
	}
	c.req = req
	f.exchange(c)
	x = newServing(ctx, f, c)
	if !f.live.Enter(x) {
		e = &Error{Code: CodeDraining, Connector: f.name, Message: "shutting down", RetryAfter: time.Second}
		x.life.Cancel(e)
		x.recordEnd(e)
		return nil, e
	}
	f.retries.Request()
	body, e := x.run()
	if e != nil {
		x.end(e)
		return nil, e
	}
	return &Response{Status: body.status, Header: body.header, Body: body, Mode: body.a.out.Mode, RequestID: c.id}, nil
}

// Shutdown takes no new requests, waits for those in flight and for prefill legs that run on
// (connector.Ending.PrefillFinishes) until ctx ends, then cuts them, and closes the connector. The error is ctx's if
// something had to be cut. Call it before http.Server.Shutdown, which waits for streams without a
// limit of its own.
func (f *Flow) Shutdown(ctx context.Context) error {
	f.live.Close()
	err := cmp.Or(f.live.Drain(ctx, errCut), f.runningOn.Drain(ctx, errCut))
	if c, ok := connector.As[io.Closer](f.conn); ok {
		err = errors.Join(err, c.Close())
	}
	if f.owned != nil {
		err = errors.Join(err, f.owned.Close())
	}
	return errors.Join(err, f.tel.Close())
}
