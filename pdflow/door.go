// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"net/http"

	"github.com/pdkit/pdkit/transport"
)

// door is how the legs of a request leave: by a RoundTripper, or by the hands of a host that runs [Steps].
type door struct {
	rt      http.RoundTripper
	retrier *transport.Retrier // what was provably not sent is sent again; decode legs, which carry a handoff, are not
	steps   *Steps
}

func newDoor(rt http.RoundTripper) *door {
	return &door{rt: rt, retrier: transport.NewRetrier(rt, transport.RetryPolicy{})}
}

// send sends a leg's request, or a side call, for which o is nil.
func (d *door) send(ctx context.Context, a *attempt, o *LegOutcome, r *http.Request) (*http.Response, error) {
	switch {
	case d.steps != nil:
		return d.steps.park(ctx, a, o, r)
	case o == nil || o.Leg != LegDecode:
		return d.retrier.Do(ctx, r)
	}
	return transport.Send(ctx, d.rt, r)
}
