// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/intake"
	"github.com/pdkit/pdkit/internal/verdict"
	"github.com/pdkit/pdkit/pdflow/internal/legs"
	"github.com/pdkit/pdkit/pdflow/internal/names"
	"github.com/pdkit/pdkit/pdflow/internal/telemetry"
	"github.com/pdkit/pdkit/transport"
)

// maxWholeResponse is the largest response of P or of an encode engine that is read; a larger one is garbage.
const maxWholeResponse = 64 << 20

// maxErrorBody is as much of an engine's error response as is passed on.
const maxErrorBody = 1 << 20

// legRequest makes a leg's HTTP request.
func (a *attempt) legRequest(ctx context.Context, ep discovery.Endpoint, leg *connector.Leg,
	o *LegOutcome) (*http.Request, *legs.Text, *Error) {
	req, text, err := legs.Request(ctx, leg, ep.URL, a.x.sender.own)
	if err != nil {
		return nil, nil, a.guard(o.Leg, "describe", func() error { return err })
	}
	a.x.fillHeader(req.Header, contract.Leg(leg).Headers)
	a.f.tel.Inject(ctx, propagation.HeaderCarrier(req.Header))
	o.Endpoint, o.RequestBytes, o.Start = ep.ID, req.ContentLength, time.Now()
	return req, text, nil
}

// sendWhole sends a leg, and reads its response to its end. The status is in o.
func (a *attempt) sendWhole(ctx context.Context, ep discovery.Endpoint, leg *connector.Leg,
	o *LegOutcome) (header http.Header, body []byte, e *Error) {
	req, text, e := a.legRequest(ctx, ep, leg, o)
	if e != nil {
		return nil, nil, e
	}
	defer text.Drop()
	a.detached.watchResend(req)
	resp, err := a.x.sender.send(ctx, a, o, req)
	if err != nil {
		return nil, nil, a.sendError(ctx, o, "send", err)
	}
	defer resp.Body.Close()
	o.Status, o.FirstByte = resp.StatusCode, time.Now()
	limit := int64(maxWholeResponse)
	if resp.StatusCode >= 300 {
		limit = maxErrorBody
	}
	body, err = intake.ReadAll(resp.Body, resp.ContentLength, limit, a.held.taker())
	o.ResponseBytes = int64(len(body))
	if resp.StatusCode >= 300 && err != nil && ctx.Err() == nil {
		body, err = nil, nil // too large or cut: the status is what matters
	}
	if err != nil {
		return nil, nil, a.sendError(ctx, o, "response", err)
	}
	return resp.Header, body, nil
}

// prefill runs the prefill leg until its response is read and known to be good.
func (a *attempt) prefill() (*connector.PrefillResult, *Error) {
	a.x.phase.Store(phasePrefill)
	leg := contract.NewPrefillLeg(a.s.Request, &a.f.traits)
	if e := a.guard(LegPrefill, "describe", func() error { return a.f.conn.Prefill(a.ctx, a.s, leg) }); e != nil {
		return nil, e
	}
	o, ctx := &a.out.Prefill, a.ctx
	if a.detached != nil {
		o, ctx = &a.detached.out, a.detached.ctx
	}
	ctx = a.legStarted(ctx, LegPrefill)
	p, e := a.sendPrefill(ctx, leg, o)
	o.End = time.Now()
	if e == nil && a.f.checker != nil {
		e = a.guard(LegPrefill, "response", func() error { return a.f.checker.CheckPrefill(a.s, p) })
	}
	if o.Err = e; e != nil {
		e.Connector = a.f.name
	}
	a.legEnded(o, p)
	if a.detached.noteEnd() || e != nil {
		return nil, e
	}
	a.prefillUsage(p)
	a.p.Store(p)
	return p, nil
}

func (a *attempt) sendPrefill(ctx context.Context, leg *connector.Leg, o *LegOutcome) (*connector.PrefillResult,
	*Error) {
	if !a.parallel.Load() {
		a.watch.Limit(a.f.limits.Prefill)
		defer a.watch.Relax()
	}
	header, body, e := a.sendWhole(a.holdPrefill(ctx), a.s.Prefill, leg, o)
	if e != nil {
		return nil, e
	}
	if !serves(o.Status) {
		return nil, a.doubt(a.refused(o, header, body))
	}
	p := &connector.PrefillResult{Status: o.Status, Header: header, Body: body, At: time.Now()}
	switch _, isError := p.Field("error"); {
	case isError:
		return nil, a.unusable(o, p.Err(), "the prefill engine answered with an error")
	case p.Err() != nil && !contract.API(a.s.API).ListResponse(body):
		return nil, a.unusable(o, p.Err(), "the prefill engine's response is not one JSON object")
	case verdict.WholeFailed(body, contract.API(a.s.API).Guarded, a.failureStop(), true):
		return nil, a.unusable(o, nil, "the prefill engine aborted the request")
	}
	return p, nil
}

// unusable is a response of a leg's engine with which no other engine can go on.
func (a *attempt) unusable(o *LegOutcome, err error, message string) *Error {
	return &Error{Code: failedCode(o.Leg), Leg: o.Leg, Phase: "response", Connector: a.f.name, Endpoint: o.Endpoint,
		Status: o.Status, Message: message, Err: err}
}

// describeDecode has the connector describe D's leg. p is P's response; nil if the leg does not wait for it.
func (a *attempt) describeDecode(p *connector.PrefillResult) (*connector.Leg, *Error) {
	leg := contract.NewLeg(a.s.Request)
	return leg, a.guard(LegDecode, "describe", func() error { return a.f.conn.Decode(a.ctx, a.s, p, leg) })
}

// decode runs the decode leg until its first event is known.
func (a *attempt) decode(ctx context.Context, leg *connector.Leg) (*Body, *Error) {
	a.x.phase.Store(phaseDecode)
	o := &a.out.Decode
	ctx = a.legStarted(ctx, LegDecode)
	body, e := a.sendDecode(ctx, leg, o)
	if e != nil {
		e.Connector = a.f.name
		if e.Code == CodeTimeout && e.Leg == LegDecode && !e.caller && a.sent && a.transfers.Load() {
			e.Phase, e.Message = phaseTransfer, "decode did not begin in time after prefill had answered"
		}
		o.Err, o.End = e, time.Now()
		a.legEnded(o, nil)
		return nil, e
	}
	return body, nil
}

// decodeInTime is decode while no prefill leg runs.
func (a *attempt) decodeInTime(ctx context.Context, leg *connector.Leg) (*Body, *Error) {
	a.watch.Limit(a.decodeLimit())
	defer a.watch.Relax()
	return a.decode(ctx, leg)
}

func (a *attempt) sendDecode(ctx context.Context, leg *connector.Leg, o *LegOutcome) (*Body, *Error) {
	if a.asksUsage() {
		leg.SetAt([]string{"stream_options", "include_usage"}, jsonTrue)
	}
	a.x.rescue.ask(leg)
	if a.rendezvous != nil {
		ctx = a.rendezvous.Hold(ctx, legs.Decode)
	}
	req, text, e := a.legRequest(ctx, a.s.Decode, leg, o)
	if e != nil {
		return nil, e
	}
	defer text.Drop()
	resp, err := a.x.sender.send(ctx, a, o, req)
	a.sent = err == nil || transport.Classify(err) != transport.SentNothing
	if err != nil {
		return nil, a.sendError(ctx, o, "send", err)
	}
	o.Status = resp.StatusCode
	if _, relayed := resp.Body.(relayedBody); relayed {
		o.FirstByte = time.Now()
		return relayedResponse(a, resp.StatusCode), nil
	}
	if !serves(resp.StatusCode) {
		defer resp.Body.Close()
		body, err := intake.ReadAll(resp.Body, resp.ContentLength, maxErrorBody, nil)
		if err != nil && ctx.Err() != nil {
			return nil, a.sendError(ctx, o, "response", err)
		}
		o.ResponseBytes = int64(len(body))
		return nil, a.doubt(a.refused(o, resp.Header, body))
	}
	encoded := intake.Encoded(resp.Header)
	b := newBody(a, resp)
	if encoded { // nobody asked for it, and what clients must not see could not be found in it
		b.drop()
		return nil, b.failed(CodeDecodeFailed, "the decode engine's response is compressed")
	}
	if e := b.readHead(ctx); e != nil {
		b.drop()
		return nil, e
	}
	if n, ok := b.s.Rewritten(); ok {
		b.header["Content-Length"] = []string{strconv.Itoa(n)}
	}
	if a.x.rest != nil && b.s.Resume == nil {
		b.drop()
		return nil, b.failed(CodeDecodeFailed, "the decode engine does not go on with the stream")
	}
	o.FirstByte = time.Now()
	if a.f.opts.responses != nil && a.s.API == connector.APIResponses {
		a.learnResponse(b)
	}
	return b, nil
}

// serves reports whether an engine's status is that of a response to use. 206 is not: nobody asked for a part.
func serves(status int) bool { return status/100 == 2 && status != http.StatusPartialContent }

// sendError turns a transport's error into ours: first of all, who ended it.
func (a *attempt) sendError(ctx context.Context, o *LegOutcome, phase string, err error) *Error {
	leg := o.Leg
	e := &Error{Code: failedCode(leg), Leg: leg, Phase: phase, Endpoint: o.Endpoint, Err: err}
	if ctx.Err() != nil {
		ended := a.f.whyEnded(ctx, leg, phase)
		if ended.Leg == leg && ended.Endpoint == "" {
			ended.Endpoint = e.Endpoint
		}
		return ended
	}
	if expired, ok := errors.AsType[*Error](err); ok {
		return expired // refused before it was sent
	}
	if errors.Is(err, intake.ErrNoMemory) {
		return noMemory(leg, phase, err)
	}
	if errors.Is(err, intake.ErrTooLarge) {
		e.Message = "the " + string(leg) + " engine's response is too large"
		return e
	}
	if transport.Classify(err) == transport.SentNothing {
		e.Phase = "connect"
		e.Message = "the " + string(leg) + " engine cannot be reached"
	} else {
		e.Message = "the " + string(leg) + " engine broke the connection"
	}
	return e
}

func failedCode(leg LegKind) Code {
	switch leg {
	case LegDecode:
		return CodeDecodeFailed
	case LegEncode:
		return CodeEncodeFailed
	}
	return CodePrefillFailed
}

// refused is a response that is not 2xx. A 4xx is the client's to see, and another pair would answer the same unless
// verdict.Refusals say that it speaks of the engine; a 5xx of decode is shown if no other attempt serves; a redirect is
// never followed.
func (a *attempt) refused(o *LegOutcome, header http.Header, body []byte) *Error {
	leg, status := o.Leg, o.Status
	e := &Error{Code: failedCode(leg), Leg: leg, Phase: "response", Endpoint: o.Endpoint,
		Status: status, Message: "the " + string(leg) + " engine answered with an error",
		wait: retryAfter(header)}
	rejected := status >= 400 && status < 500 || status == http.StatusNotImplemented
	if rejected {
		e.Code, e.Message = CodePrefillRejected, "the engine refused the request"
		if leg == LegDecode {
			e.Code = CodeDecodeRejected
		}
	}
	if rejected || leg == LegDecode && status >= 500 && status < 600 {
		private := a.private()
		said := verdict.FaultOf(body, private)
		e.engine = &engineError{status: status, retryAfter: header.Get("Retry-After"), said: said}
		if private.Models != nil { // an engine's name for its model may be one of the words that tell the scope
			private.Models = nil
			said = verdict.FaultOf(body, private)
		}
		e.scope = verdict.ScopeOf(status, said)
		a.compareContexts(e)
	}
	return e
}

// doubt has an engine's refusals believed for as long as it serves others, too: see doubts. An engine that the request
// names is the only one that can be asked.
func (a *attempt) doubt(e *Error) *Error {
	x, rejected := a.x, e.Code == CodePrefillRejected || e.Code == CodeDecodeRejected
	named := x.given != nil || e.Leg == LegPrefill && x.prefill != "" || e.Leg == LegDecode && x.decode != ""
	if rejected && e.scope == verdict.ScopeRequest && !named {
		e.doubted, e.proven = a.f.doubts.refused(e.Endpoint)
	}
	return e
}

// reaches reports whether a host belongs to the session's engines or stands in a URL among their attributes.
func (a *attempt) reaches(host string) bool {
	for _, ep := range []discovery.Endpoint{a.s.Prefill, a.s.Decode} {
		if ep.Host() == host {
			return true
		}
		for _, v := range ep.Attributes {
			if !strings.Contains(v, "://") {
				continue
			}
			if u, err := url.Parse(v); err == nil && u.Hostname() == host {
				return true
			}
		}
	}
	return false
}

// asksEngine reports whether a side call goes to a server that gets a leg.
func (a *attempt) asksEngine(u *url.URL) bool {
	return slices.ContainsFunc([]*url.URL{a.s.Prefill.URL, a.s.Decode.URL}, func(of *url.URL) bool {
		return of != nil && of.Scheme == u.Scheme && of.Host == u.Host
	})
}

// private returns what no client may read in an engine's text.
func (a *attempt) private() verdict.Private {
	own := map[string]bool{}
	for _, e := range append([]discovery.Endpoint{a.s.Prefill, a.s.Decode}, a.s.Encode...) {
		names.Of(&e, func(name string) { own[name] = true })
	}
	set, _ := a.f.picker.(EngineNamer)
	p := verdict.Private{Asked: a.x.asked,
		Engine: func(word string) bool { return own[word] || set != nil && set.NamesEngine(word) }}
	if a.x.names != nil {
		p.Models = a.x.names.Hide
	}
	return p
}

// legStarted opens a leg's span and tells observers.
func (a *attempt) legStarted(ctx context.Context, leg LegKind) context.Context {
	ep, of, age := &a.s.Prefill, &a.legs.prefill, time.Duration(0)
	if leg == LegDecode {
		ep, of, age = &a.s.Decode, &a.legs.decode, a.out.HandoffAge
	}
	*of, ctx = a.x.tel.Leg(ctx, string(leg), ep, a.s, age)
	for _, o := range a.f.opts.observers {
		if o.LegStart != nil {
			o.LegStart(ctx, a.s, leg)
		}
	}
	return ctx
}

func (a *attempt) legEnded(o *LegOutcome, p *connector.PrefillResult) {
	of := &a.legs.prefill
	if o.Leg == LegDecode {
		of = &a.legs.decode
	}
	if o.Err == nil && serves(o.Status) {
		a.f.doubts.served(o.Endpoint)
	}
	leg := *of
	if !leg.Begun() {
		return
	}
	*of = telemetry.Leg{}
	leg.End(&telemetry.LegEnd{Code: codeLabel(o.Err), Status: o.Status, RequestBytes: o.RequestBytes,
		ResponseBytes: o.ResponseBytes, Start: o.Start, FirstByte: o.FirstByte, End: o.End})
	_ = a.guard("", "observe", func() error {
		for _, ob := range a.f.opts.observers {
			if ob.LegEnd != nil {
				ob.LegEnd(a.x.client, a.s, o, p)
			}
		}
		return nil
	})
	if o.Leg == LegPrefill && a.prefillDone != nil {
		_ = a.guard("", "done", func() error { a.prefillDone(o); return nil })
	}
}
