// SPDX-License-Identifier: Apache-2.0

package decide

// The reasons of the policies of this package.
const (
	ReasonPolicy       = "policy"       // [Always] or [Never]
	ReasonShort        = "short"        // the prompt is shorter than the threshold
	ReasonCached       = "cached"       // decode has so much of the prompt that the rest is short, or fast
	ReasonFaster       = "faster"       // the first token comes earlier
	ReasonInterference = "interference" // prefill there would slow down requests that generate
	ReasonOnly         = "only"         // there is no other option
	ReasonObjectives   = "objectives"   // no option meets them
	ReasonUnknown      = "unknown"      // the policy lacks figures
)

// The reasons of [Picker].
const (
	reasonDoubtful   = "doubtful"    // predictions were wrong lately, and the inner picker decides
	reasonNotAllowed = "not_allowed" // the policy has decided what the connector or the request forbids
	reasonChanged    = "changed"     // what was decided could not be picked any more, and the inner picker decides
)

// Always splits each request. Which engines serve is the scheduler's choice.
func Always() Policy {
	return Func(func(_ *Input, out *Decision) {
		*out = undecided(ReasonPolicy)
		out.Action = Split
	})
}

// Never gives each request to one decode engine, where any may serve alone. Which one is the scheduler's choice. Where
// none may, it leaves the request undecided.
func Never() Policy {
	return Func(func(in *Input, out *Decision) {
		*out = undecided(ReasonOnly)
		if mostCached(in) != Any {
			out.Action, out.Reason = DecodeAlone, ReasonPolicy
		}
	})
}

// Threshold gives a request to a decode engine alone if its prompt has fewer than prompt tokens, or if fewer than
// uncached tokens of it are not in that engine's prefix cache. It leaves all others undecided. 0 switches either rule
// off. The decode engine is the one with most of the prompt in its cache; if no engine has any of it, the choice is the
// scheduler's.
//
// llm-d decides by the second rule (the prefix-based PD decider of llm-d-inference-scheduler, whose threshold is
// nonCachedTokens, and whose default of 0 means that nothing is ever split there); vLLM's and Dynamo's conditional
// disaggregation do by both (Dynamo: max_local_prefill_length).
func Threshold(uncached, prompt int) Policy {
	return Func(func(in *Input, out *Decision) {
		*out = undecided("")
		d := mostCached(in)
		if d == Any {
			return
		}
		cached := min(in.Decode[d].Cached, in.Prompt)
		switch {
		case in.Prompt < prompt:
			out.Reason = ReasonShort
		case in.Prompt-cached < uncached && cached > 0:
			out.Reason = ReasonCached
		case in.Prompt-cached < uncached:
			out.Reason = ReasonShort
		default:
			return
		}
		if out.Action = DecodeAlone; cached > 0 {
			out.Decode = d
		}
	})
}

// mostCached returns the decode engine that may serve alone and has most of the prompt in its cache, of equal ones the
// one with the least to do. Any: there is none.
func mostCached(in *Input) int {
	best := Any
	all := in.Decode[:min(len(in.Decode), CandidatesMost)]
	for k, i := 0, start(in.Rand, len(all)); k < len(all); k, i = k+1, i+1 {
		if i == len(all) {
			i = 0
		}
		c := &all[i]
		if !c.Alone {
			continue
		}
		if best == Any || c.Cached > all[best].Cached || c.Cached == all[best].Cached && c.idler(&all[best]) {
			best = i
		}
	}
	return best
}

// idler reports whether c has less to do than other.
func (c *Candidate) idler(other *Candidate) bool {
	a, b := c.QueueTokens+c.Context, other.QueueTokens+other.Context
	if a != b {
		return a < b
	}
	return c.Queue+c.Running < other.Queue+other.Running
}

// Chain asks policies one after another until one has decided. What the last one leaves undecided stays so.
func Chain(policies ...Policy) Policy {
	return Func(func(in *Input, out *Decision) {
		*out = undecided("")
		for _, p := range policies {
			if p.Decide(in, out); out.Action != Undecided {
				return
			}
		}
	})
}
