// SPDX-License-Identifier: Apache-2.0

package decide

import "time"

// Policy decides for one request. Policies are values without state, clock and locks: the same Input gives the same
// Decision, in a gateway, in a simulation and in a verifier. Many goroutines may call Decide at once.
type Policy interface {
	// Decide fills all of out. It must not keep or change in, which its caller uses again. It does not block, and
	// should not allocate.
	Decide(in *Input, out *Decision)
}

// Func is a function that is a [Policy].
type Func func(in *Input, out *Decision)

// Decide calls the function.
func (f Func) Decide(in *Input, out *Decision) { f(in, out) }

// Input is all that a policy may know. It has no member for the length of the response: nobody knows that in advance.
type Input struct {
	Prompt int  // tokens
	Exact  bool // Prompt was counted; else it is an estimate
	Limit  int  // tokens that the client allows the response; 0: it has not said
	Class  Class

	// The engines of each role that could serve the request, best known first or in no order. Only the first
	// [CandidatesMost] of each count. An engine that has both roles may be in both.
	Prefill, Decode []Candidate

	TokenBytes int     // of KV cache for one token of the prompt, over all layers; 0: not known
	Link       float64 // bytes a second from a prefill to a decode engine; 0: not known, transfers take no time

	Rand uint64 // the only source of chance: ties are broken by it
}

// Class is what a request's client was promised.
type Class struct {
	TTFT, ITL time.Duration // objectives: time to the first token, and between two tokens; 0: the policy's own
	Refusable bool          // the request may be refused where its objectives cannot be met
}

// CandidatesMost is how many engines of each role a policy looks at.
const CandidatesMost = 64

// Candidate is one engine, as far as it is known. Zero is the honest value of what is not known.
type Candidate struct {
	Queue       int // requests that wait
	QueueTokens int // prompt tokens to be computed before this request's; 0 with a Queue: it is like this request
	Running     int // requests that generate, or that it prefills for itself
	Context     int // tokens of KV cache that these hold

	Coming        int // requests that will generate here when another engine has computed their prompts
	ComingContext int // tokens of their prompts
	// Moving are the tokens of KV that a prefill engine has still to send, or a decode engine to get: also those of
	// prompts that are yet to be computed.
	Moving int
	// Prefilled is how many prompt tokens a second a decode engine has computed lately, beside its requests that
	// generate.
	Prefilled float64

	KV    Memory
	Speed Speed
	Age   time.Duration // of these figures

	Cached      int  // tokens of this prompt's beginning in the engine's prefix cache
	CachedExact bool // the engine has told so; else it is what was sent there lately

	Alone bool // may serve the whole request
	// Of a decode engine: bit i is set if Prefill[i] cannot prefill for it, by the connector's rules or because it is
	// the same engine. 0: all can.
	Apart uint64
}

// Memory is an engine's KV cache, in tokens.
type Memory struct {
	Free, Total int // Total 0: not known
}

// Speed is the time of an engine's step in seconds, as a sum of products:
//
//	step = Base + PerRequest·requests + PerContext·context tokens + PerPrompt·prompt tokens
type Speed struct {
	Base, PerRequest, PerContext float64
	PerPrompt                    float64 // 0: the engine's speed is not known
}

// step is a decode step's time in seconds, with what prefill takes of the engine's time beside it: see [Predicted].
func (s *Speed) step(requests, context, prefilled float64) float64 {
	return (s.Base + s.PerRequest*requests + s.PerContext*context) / (1 - min(prefilled*s.PerPrompt, busiest))
}

// Action is what is to be done.
type Action uint8

// The actions.
const (
	Undecided    Action = iota // the policy leaves it to the next one of a [Chain]; in the end the request is split
	Split                      // one engine prefills, another one decodes
	DecodeAlone                // a decode engine serves the whole request
	PrefillAlone               // a prefill engine does
	Refuse                     // nobody does
)

var actions = [...]string{"undecided", "split", "decode_alone", "prefill_alone", "refuse"}

// String returns the action's name in metrics.
func (a Action) String() string {
	if int(a) < len(actions) {
		return actions[a]
	}
	return "unknown"
}

// Any leaves the choice of an engine to the scheduler.
const Any = -1

// Decision is what a policy says.
type Decision struct {
	Action          Action
	Prefill, Decode int           // index in Input's lists, or [Any]. PrefillAlone: Prefill serves
	TTFT, ITL       time.Duration // predicted; 0: the policy predicts nothing
	Reason          string        // in a word like faster, one of few, since it becomes a label of metrics
	RetryAfter      time.Duration // of Refuse: when there may be room
}

// undecided is what a policy says that has nothing to say.
func undecided(reason string) Decision {
	return Decision{Prefill: Any, Decode: Any, Reason: reason}
}
