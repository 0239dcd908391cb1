// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
)

// Picker chooses the engines of one attempt, both with one call, since P and D are coupled: same group, reachable KV,
// near each other. Implementations must be safe for concurrent use, and return [CodeNoEndpoint] (or an error that wraps
// it) if no engines are there now. They must not block, except where requests are meant to queue, until ctx ends at
// most: package pdflow/admit does so. An *[Error] of [CodeOverloaded] refuses the request.
//
// Where only engines of role both serve alone ([PickInput].Both), and there are engines but none of that role, ready or
// not, an *[Error] of [CodeUnsupported] says that waiting is of no use.
//
// A picker that also has Changed() <-chan struct{}, a channel closed at the next change of its engines, lets a flow
// wait for engines a moment before it gives up.
//
// A picker that also has Ready(in *PickInput) error tells by it, without choosing, whether Pick would find engines for
// a request: see [Flow.Ready]. in then has no Request, Header and RequestID. With Encode, an encode engine must be
// there.
type Picker interface {
	Pick(ctx context.Context, in *PickInput) (Pick, error)
}

// PickInput is what a picker may look at.
type PickInput struct {
	Request   *connector.ClientRequest // model, API, body
	Header    http.Header              // the client's; read only
	RequestID string
	Attempt   int      // 1 for the first
	Avoid     []string // IDs of engines that failed in earlier attempts: used only if no others are there
	Single    bool     // one engine for the whole request: only Pick.Decode is wanted
	// only engines of role both serve alone, and they take no part in pairs: they run without the connector (see
	// PairOnly of connector.Traits)
	Both bool
	// no engine that can prefill may serve alone: see PrefillPairOnly of connector.Traits
	DecodeOnly bool
	Encode     int // engines wanted for an encode stage, 0 for none

	Connector connector.KVConnector // the asking flow's, for its rules about pairs; nil for none
}

// Avoids reports whether an endpoint is to be avoided.
func (in *PickInput) Avoids(id string) bool {
	return len(in.Avoid) > 0 && slices.Contains(in.Avoid, id)
}

// Pick is a choice. A zero Prefill means that Decode serves the whole request.
type Pick struct {
	Prefill, Decode discovery.Endpoint
	Encode          []discovery.Endpoint
	// Done is called exactly once, when both legs have ended, or P's runs on (Outcome.PrefillRuns). Nil allowed.
	Done func(*Outcome)

	// PrefillDone is called at most once, when the prefill leg has ended: from then on P computes nothing for this
	// attempt. It comes before Done, or after a Done whose outcome has PrefillRuns. Nil allowed. Not called where the
	// leg was never begun.
	PrefillDone func(*LegOutcome)

	// The data-parallel ranks that Session.PrefillRank and Session.DecodeRank give to the connector. Zero leaves the
	// choice to them.
	PrefillRank, DecodeRank connector.Rank
}

// pick asks the picker, and waits for a change, bounded by pickWait, as long as nobody is there. It fills p.
func (f *Flow) pick(ctx context.Context, in *PickInput, p *Pick) *Error {
	var err error
	if *p, err = f.picker.Pick(ctx, in); err != nil {
		return f.pickLater(ctx, in, p, err)
	}
	return nil
}

// pickLater goes on where the picker has answered with err.
func (f *Flow) pickLater(ctx context.Context, in *PickInput, p *Pick, err error) *Error {
	changing, ok := f.picker.(interface{ Changed() <-chan struct{} })
	if !errors.Is(err, CodeNoEndpoint) || !ok || f.opts.pickWait <= 0 {
		return f.pickError(ctx, err)
	}
	timer := time.NewTimer(f.opts.pickWait)
	defer timer.Stop()
	for {
		ch := changing.Changed() // before Pick, so that no change is missed
		if *p, err = f.picker.Pick(ctx, in); err == nil {
			return nil
		}
		select {
		case <-ch:
		case <-timer.C:
			return f.pickError(ctx, err)
		case <-ctx.Done():
			return f.pickError(ctx, ctx.Err())
		}
	}
}

func (f *Flow) pickError(ctx context.Context, err error) *Error {
	if ctx.Err() != nil {
		return f.ended(ctx, "", "pick")
	}
	var e *Error
	if errors.As(err, &e) && e.Code != CodeNoEndpoint {
		return e
	}
	if !errors.Is(err, CodeNoEndpoint) {
		return &Error{Code: CodeInternal, Phase: "pick", Connector: f.name, Message: "the picker failed", Err: err}
	}
	msg := "no engines are ready for this model"
	if e != nil && e.Message != "" {
		msg = e.Message
	}
	return &Error{Code: CodeNoEndpoint, Phase: "pick", Connector: f.name, Message: msg, RetryAfter: time.Second,
		Err: err}
}
