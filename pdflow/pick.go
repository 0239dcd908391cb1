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
// near each other. Its methods must be safe for concurrent use. Package pdflow/pick has pickers, and pick.Func makes
// one of a function.
type Picker interface {
	// Pick returns an error that is, or wraps, [CodeNoEndpoint] if no engines are there now. It must not block, except
	// where requests are meant to queue, until ctx ends at most: package pdflow/admit does so. An *[Error] of
	// [CodeOverloaded] refuses the request. Where one engine is to serve alone, there are engines, and none of them can
	// ever do so by the rules of Bind, an *[Error] of [CodeUnsupported] says that waiting is of no use.
	Pick(ctx context.Context, in *PickInput) (Pick, error)

	// Changed returns a channel that is closed at the next change of the engines. With it a flow waits for engines a
	// moment before it gives up. Nil: the picker does not tell, and the flow does not wait.
	Changed() <-chan struct{}

	// Ready tells, without choosing, whether Pick would find engines for a request: see [Flow.Ready]. in has no
	// Request, Header and RequestID. With Encode, an encode engine must be there. A picker that cannot tell returns
	// nil.
	Ready(in *PickInput) error

	// Bind returns the picker that a flow is to ask. [New] calls it once, with the rules that hold as long as the flow:
	//
	//   - Engines form a pair by the rules of c, as in [check.Pair]. c is nil for a caller without a
	//     connector.
	//   - serving says which engines may serve alone: with PairOnly only those of role both, which then take no part in
	//     pairs, and with PrefillPairOnly none that can prefill. A flow gives that of c's Traits.
	//
	// What is known of engines (load, cooldowns, limits) belongs to all pickers that were bound from one, since their
	// flows send to the same engines. A picker must not keep those that it has bound: a program makes a flow each time
	// that its configuration changes, and never unbinds one. A picker without an interest in rules returns itself. One
	// that asks another picker binds that, and returns itself around it: a type that embeds a Picker must do so, too,
	// or the flow asks the embedded one alone.
	Bind(c connector.KVConnector, serving connector.Serving) Picker
}

// EngineNamer is a [Picker] that knows all engines of its set by name. A flow keeps these names out of the error texts
// of engines that clients get; with a picker that is none it knows the engines of the attempt only. The pickers of
// package pdflow/pick are. One that asks another picker hands the question on.
type EngineNamer interface {
	// NamesEngine reports whether a word names an engine: as its host, its ID, or another name that the engines have
	// for it. The word is in lower case, and without a port unless the ID has one. It may be called concurrently, once
	// for each word of an error text.
	NamesEngine(word string) bool
}

// EngineHealth is a [Picker] that knows how its engines are. A flow asks it about an engine that is silent in
// mid-stream ([WithTimeouts]), and probes the engine where nothing is known. The pickers of package pdflow/pick are.
// One that asks another picker hands the question on.
type EngineHealth interface {
	// EngineHealth tells, by its ID, whether an engine is well. known is false unless something has shown it within the
	// last seconds. It may be called concurrently.
	EngineHealth(id string) (well, known bool)
}

// Preparer is a [Picker] whose Pick has to ask somebody about a request. A picker around another one hands Prepare on;
// if it calls that one's Pick under a lock, or several times, it first calls Prepare, without the lock.
type Preparer interface {
	// Prepare returns in, or a copy that has the answers: Pick waits for none with it, in the request's further tries,
	// too. It may be called concurrently, and takes a bounded time.
	Prepare(ctx context.Context, in *PickInput) *PickInput
}

// Prompt is what is known of the tokens of a request's prompt. The zero value: nothing, and nobody is to be asked.
type Prompt struct {
	IDs   []uint32 // read only
	Exact bool     // the engine will have the same
}

// PickInput is what a picker may look at.
type PickInput struct {
	Request   *connector.ClientRequest // model, API, body
	Header    http.Header              // the client's; read only
	RequestID string
	Attempt   int      // 1 for the first
	Avoid     []string // IDs of engines that failed in earlier attempts: used only if no others are there
	Full      []string // those of Avoid that have not failed, but are at their limits: preferred to ones in a cooldown
	Single    bool     // one engine for the whole request: only Pick.Decode is wanted
	Pair      bool     // of use only if two engines serve (a second prefill, a synthetic probe); never with Single
	Encode    int      // engines wanted for an encode stage, 0 for none

	// TooShort is the length, in tokens, of the context of an engine that has refused the request as too long: engines
	// with a longer one, or one that is not known, are preferred. 0: none has.
	TooShort int

	// Prompt is what a [Preparer] has found. Nil: it was not asked.
	Prompt *Prompt

	// IDs of engines that are chosen already: the picker chooses the other engine of the pair, and ranks. "" leaves the
	// choice to it; with Single, Prefill says nothing. No other engine may take their place, not even if they are in
	// Avoid. The error is an *[Error] of [CodeNoEndpoint] if such an engine is known and cannot serve now, and of
	// [CodeNotFound], with the Param "prefill" or "decode", if the picker knows no engine of this ID for that role.
	Prefill, Decode string
}

// names reports whether a choice has the engines that were chosen already. One that needs no prefill engine, and so is
// served by Decode alone, has the one that was to prefill.
func (in *PickInput) names(p *Pick) bool {
	prefill := p.Prefill.ID
	if p.Prefill.URL == nil {
		prefill = p.Decode.ID
	}
	return (in.Decode == "" || in.Decode == p.Decode.ID) && (in.Prefill == "" || in.Single || in.Prefill == prefill)
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

	// Reason is why the picker has chosen one engine or two, in a word like no_header; "" if there is nothing to say.
	// It is Outcome.Reason, SessionInfo.Reason and pd.reason of metrics and spans, so let it have few values.
	Reason string

	// The data-parallel ranks that Session.PrefillRank and Session.DecodeRank give to the connector. Zero leaves the
	// choice to them.
	PrefillRank, DecodeRank discovery.Rank
}

// onlyDecode leaves the whole request to D.
func (p *Pick) onlyDecode() {
	p.Prefill, p.PrefillRank, p.Encode = discovery.Endpoint{}, discovery.Rank{}, nil
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
	if !errors.Is(err, CodeNoEndpoint) || f.opts.pickWait <= 0 {
		return f.pickError(ctx, err)
	}
	ch := f.picker.Changed() // before Pick, so that no change is missed
	if ch == nil {
		return f.pickError(ctx, err)
	}
	timer := time.NewTimer(f.opts.pickWait)
	defer timer.Stop()
	for ; ; ch = f.picker.Changed() {
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
		return f.whyEnded(ctx, "", "pick")
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
