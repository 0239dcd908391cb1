// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"time"

	"github.com/pdkit/pdkit/connector"
)

// Mode says how a request was served, and is the value of the header X-PD-Mode.
type Mode string

// The modes.
const (
	ModeDisaggregated Mode = "disaggregated" // two engines
	ModeAggregated    Mode = "aggregated"    // one engine, by the kind of request or of endpoint
	ModeFallback      Mode = "fallback"      // not as configured, because no pair could serve it so
)

// LegOutcome is what is known of one leg after its end.
type LegOutcome struct {
	Leg           LegKind
	Endpoint      string // the engine's ID, "" if the leg was never sent
	Status        int    // the engine's status, 0 if it gave none
	Start         time.Time
	FirstByte     time.Time // zero if none came
	End           time.Time
	RequestBytes  int64 // of the body
	ResponseBytes int64 // of the body
	Err           *Error
}

// Duration is the time from sending to the end, 0 for a leg that was never sent.
func (l *LegOutcome) Duration() time.Duration {
	if l.Start.IsZero() || l.End.IsZero() {
		return 0
	}
	return l.End.Sub(l.Start)
}

// Usage are a request's tokens. A count is 0 where the engine's response does not tell it: streams of chats and
// completions tell only if the client asked, or the flow did ([Telemetry].Usage).
type Usage struct {
	Input  int64 // of the prompt
	Output int64 // generated
	Cached int64 // of the prompt: those that prefill found in its cache
	// of the prompt: those that decode had not to compute, because it took them over or had them in its cache; 0 where
	// the protocol's engines do not tell (connector.Serving.ReusedInUsage)
	Reused int64
}

// Outcome is what is known of one attempt after both legs have ended. It is given to the picker and to observers.
type Outcome struct {
	Session   *connector.Session
	Connector string
	Mode      Mode
	Reason    string // why the picker let one engine serve, or two: Pick.Reason
	Prefill   LegOutcome
	Decode    LegOutcome
	// from the last byte of P's response until the flow makes the decode leg of it; 0 if D's leg does not wait for P,
	// or if the response does not say where the KV is
	HandoffAge time.Duration
	KVTokens   int64 // prompt tokens that P says it computed or held; 0 where it does not say
	Usage      Usage // tokens, as the engines count them
	// how many tokens the client had when this attempt took its stream over from one whose decode engine had died: see
	// WithRescue; 0 for any other attempt
	Resumed int
	// decode was sent and got no KV from prefill: the engines hold memory for it for a while, so the picker gives the
	// pair a cooldown
	Orphan bool
	// P's leg still runs, since its protocol lets it finish (connector.Ending.PrefillFinishes). Prefill then has only
	// Leg and Endpoint; Observer.LegEnd and Pick.PrefillDone come when the leg ends
	PrefillRuns bool
	Err         *Error // nil if the client got a whole response
	// no further attempt of this flow follows; a fallback flow has its own. Observers are told of a failed attempt once
	// that is known. Pick.Done is told before the next pick: false there says that one is to follow, if engines are
	// found and the request does not end before
	Final bool
	// Why a failed attempt is retried, or is not: a value of pd.reason, which docs/metrics.md lists. "" if the client
	// got its response or left.
	Retry string
}

// Observer sees attempts and their legs begin and end, and requests that are refused before; a function may be nil.
// Calls come from the requests' own goroutines and must be quick. What it is given must not be changed.
type Observer struct {
	SessionStart func(ctx context.Context, s *connector.Session) // an attempt begins
	// SessionEnd comes when the client's response is through, so a reader of outcomes has to wait for it a moment
	// longer than the client.
	SessionEnd func(ctx context.Context, o *Outcome)
	LegStart   func(ctx context.Context, s *connector.Session, leg LegKind)
	// LegEnd gets P's response for the prefill leg, nil if there is none.
	LegEnd func(ctx context.Context, s *connector.Session, o *LegOutcome, p *connector.PrefillResult)
	// Refused is told of a request that no flow took. Nothing else is.
	Refused func(ctx context.Context, r *Refusal)
}
