// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"net/http"

	"github.com/pdkit/pdkit/transport"
)

// sender is how the legs of a request leave: by a RoundTripper, or by the hands of a host that runs [Steps].
type sender struct {
	rt      http.RoundTripper
	retrier *transport.Retrier // what was provably not sent is sent again; decode legs, which carry a handoff, are not
	own     bool               // rt is pdkit's own transport, which asks nothing about legs
	steps   *Steps
}

func newSender(rt http.RoundTripper) *sender {
	_, own := rt.(*transport.Transport)
	return &sender{rt: rt, own: own, retrier: transport.NewRetrier(rt, transport.RetryPolicy{})}
}

// send sends a leg's request, or a side call, for which o is nil.
func (s *sender) send(ctx context.Context, a *attempt, o *LegOutcome, r *http.Request) (resp *http.Response,
	err error) {
	if !s.own && s.steps == nil {
		ctx = context.WithValue(ctx, legKey{}, a.legInfo(o))
	}
	switch {
	case s.steps != nil:
		resp, err = s.steps.park(ctx, a, o, r)
	case o == nil || o.Leg != LegDecode:
		resp, err = s.retrier.Do(ctx, r)
	default:
		resp, err = transport.Send(ctx, s.rt, r)
	}
	if err == nil && resp.ContentLength == 0 && resp.Body != http.NoBody {
		resp.ContentLength = -1 // a response made by hand says nothing of its length, which is not 0
	}
	return resp, err
}

// LegInfo tells a RoundTripper which leg it sends.
type LegInfo struct {
	Leg       LegKind // "" for a connector's side call
	Endpoint  string  // the engine's ID
	Connector string
	RequestID string // the client's
	SessionID string // of the attempt
	Attempt   int    // 1 for the first
}

// LegFromContext returns the leg to which the context of a request belongs that a flow sends through a RoundTripper of
// the host's ([WithTransport], [Flow.RoundTripper], [Step.Send]).
func LegFromContext(ctx context.Context) (LegInfo, bool) {
	info, ok := ctx.Value(legKey{}).(LegInfo)
	return info, ok
}

type legKey struct{}

func (a *attempt) legInfo(o *LegOutcome) LegInfo {
	info := LegInfo{Connector: a.f.name, RequestID: a.x.id, SessionID: a.s.ID, Attempt: a.s.Attempt}
	if o != nil {
		info.Leg, info.Endpoint = o.Leg, o.Endpoint
	}
	return info
}
