// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
	"github.com/pdkit/pdkit/pdflow/decide"
)

// What of a trial is compared.
var (
	meanTTFT = measure{"TTFT mean", func(s *shown) float64 { return s.mean }, false}
	p95TTFT  = measure{"TTFT p95", func(s *shown) float64 { return s.p95 }, false}
	missed   = measure{"missed the objectives or refused", func(s *shown) float64 { return 1 - s.good }, true}
)

// talks are the conversations of the trial of turn 2: as in a chat, later questions are short.
var talks = turns{conversations: 150, turns: 8, rate: 1, think: 8,
	first: [2]int{200, 1200}, later: [2]int{16, 512}, output: [2]int{64, 384}}

// papers are the publications of docs/literature.md.
func papers() []paper {
	chat := simulate.SLO{TTFT: time.Second, TPOT: 25 * time.Millisecond}
	threshold := []named{always, never, {"threshold", constant(bounded(2048, 0.7))}}
	long := simulate.SLO{TTFT: 2 * time.Second, TPOT: 25 * time.Millisecond}
	deflection := []named{always, {"predicted", predicted}}
	talk := simulate.SLO{TTFT: 200 * time.Millisecond, TPOT: 15 * time.Millisecond}
	turn2 := []named{always, {"turn 2 at decode", constant(bounded(1<<30, 0.5))}}
	overload := simulate.SLO{TTFT: 4 * time.Second, TPOT: 35 * time.Millisecond}
	refusals := []named{{"load of the moment", constant(decide.Func(byLoad))}, {"prediction", byPrediction}}
	usual := generated(simulate.Usual())
	return []paper{
		{
			name:  "Conditional threshold",
			claim: "lower TTFT than always, lower ITL than never; no figure",
			text:  conditionalText,
			gains: trial{what: "2 prefill and 2 decode engines, the chat trace at 0.3 times its speed:", of: meanTTFT,
				trace: usual, speed: 0.3, requests: 1000, pd: [2]int{2, 2}, link: 6.25e9, slo: chat,
				policies: threshold},
			loses: trial{what: "the same at 0.6 times its speed. Decode has no room for prefill beside its streams:",
				of: missed, trace: usual, speed: 0.6, requests: 1000, pd: [2]int{2, 2}, link: 6.25e9, slo: chat,
				policies: threshold},
		},
		{
			name: "Deflection", claim: "P95 of TTFT up to −81 %", text: deflectionText,
			gains: trial{what: "2 prefill and 2 decode engines, Mooncake's trace at 0.3 times its speed, 10 Gbit/s:",
				of: p95TTFT, trace: simulate.Mooncake, speed: 0.3, requests: 700, pd: [2]int{2, 2}, link: 1.25e9,
				slo: long, policies: deflection},
			loses: trial{what: "3 prefill engines and 1 that decodes, 50 Gbit/s. Decode alone is above " +
				"the objective, and gets prompts to compute, too:", of: missed, trace: simulate.Mooncake, speed: 0.3,
				requests: 500, pd: [2]int{3, 1}, link: 6.25e9, slo: long, policies: deflection},
		},
		{
			name: "Turn 2 at decode", claim: "TTFT of turn 2 and later −68 %", text: turn2Text,
			gains: trial{what: "2 prefill and 2 decode engines, one new conversation a second, 50 Gbit/s. TTFT is " +
				"that of turn 2 and later:", of: meanTTFT, trace: talks.trace, counts: talks.isLater(), speed: 1,
				requests: 1200, pd: [2]int{2, 2}, link: 6.25e9, slo: talk, policies: turn2},
			loses: trial{what: "three new conversations a second. What is still to be computed of each turn, the " +
				"response before it included, slows down the streams:", of: missed, trace: talks.trace,
				counts: talks.isLater(), speed: 3, requests: 1200, pd: [2]int{2, 2}, link: 6.25e9, slo: talk,
				policies: turn2},
		},
		{
			name:  "Early rejection by prediction",
			claim: "rejected requests −4.8 % (3,771 to 3,589)",
			text:  rejectionText,
			gains: trial{what: "Mooncake's trace at 6 times its speed:", of: missed, trace: simulate.Mooncake, speed: 6,
				requests: 1500, pd: [2]int{8, 8}, link: 50e9, slo: overload, refuses: true, policies: refusals},
			loses: trial{what: "2 prefill and 2 decode engines far above what they can serve: one new document of " +
				"16,000 to 48,000 tokens a second, 16 questions about it within half a second, objectives of 4 s and " +
				"35 ms. It was found among 13 such settings, in most of which prediction is as good or better; with " +
				"two other seeds 9.5 % good become 4.8 %, and 8.9 % become 8.3 %. Why is not known. Never to refuse " +
				"is worse than both (below 1 %). On Mooncake's trace no place was found, from 1 to 9 times its speed:",
				of: missed, trace: fan, speed: 1, requests: 640, pd: [2]int{2, 2}, link: 50e9, slo: overload,
				refuses: true, policies: refusals},
		},
	}
}

const conditionalText = "NVIDIA Dynamo's page [Conditional " +
	"Disaggregation](https://docs.nvidia.com/dynamo/dev/advanced-customizations/conditional-disaggregation) " +
	"(experimental, read in November 2026) sends a request to a decode worker alone if fewer than 2,048 tokens of " +
	"it, and less than 70 % of it, are not cached there. It says that this lowers the TTFT of always splitting and " +
	"avoids the slow tokens of never splitting, for conversations over long prompts whose KV is used again. It gives " +
	"no figure.\n\nHere: the same rule (`decide.Threshold`, and the share beside it), the generated trace of " +
	"conversations with system prompts, links of 50 Gbit/s."

const deflectionText = "*Towards Load-Aware Prefill Deflection for Disaggregated LLM Serving* " +
	"(arXiv:2607.02043, July 2026): a cluster of A100s with 2 prefill and 2 decode nodes, vLLM, DeepSeek-V2-Lite, " +
	"bursty production-style traces. Of the P95 of TTFT 2 to 23 % is prefill, the rest is waiting and the transfer " +
	"of KV. A request is prefilled at decode, in chunks that keep the objective of the time between tokens, where " +
	"its first token comes sooner so. Claimed against other disaggregated schedulers: P95 of TTFT up to −81 " +
	"%.\n\nHere: `decide.Predicted`, which decides by the objectives too, but cannot choose chunks: an engine's " +
	"steps take 8,192 tokens. The other scheduler is the gateway's own that always splits."

const turn2Text = "*Not All Prefills Are Equal: PPD Disaggregation for Multi-turn LLM Serving* " +
	"(arXiv:2603.13358, March 2026; ICML 2026): 4 H100, vLLM, Llama-3.1-8B, conversations of ShareGPT, 2 prefill and " +
	"2 decode engines among other ratios. From turn 2 on, decode itself computes what is new of the prompt. Claimed: " +
	"TTFT of turn 2 and later −68 %. The paper says that no fixed route is best for all objectives, and chooses for " +
	"each request.\n\nHere: the fixed route, since that shows the effect: a request is served by decode alone if at " +
	"least half of its prompt is cached there. Conversations have eight turns, the first with 200 to 1,200 tokens, " +
	"later ones with 16 to 512, responses of 64 to 384 tokens. The model's engines cache prompts only, so decode " +
	"computes the response of the turn before again, which real ones need not."

const rejectionText = "*Mooncake: A KVCache-centric Disaggregated Architecture for LLM Serving* " +
	"(arXiv:2407.00079, section 7 and table 3): 8 prefill and 8 decode nodes of 8 A800 each, a model like " +
	"LLaMA2-70B, 23,000 requests of a real trace at twice its speed. Rejected were 4,183 requests where each phase " +
	"judges by its own load, 3,771 where decode's load is judged before prefill (early rejection), and 3,589 where " +
	"it is decode's load after prefill that is predicted.\n\nHere: Mooncake's published trace of conversations, the " +
	"8B model, 8 prefill and 8 decode engines, and objectives of about ten times the TTFT and five times the time " +
	"between tokens of a request alone. `load of the moment` refuses if no decode engine keeps the objective now, or " +
	"all of prefill's queues are too long; `prediction` refuses what `decide.Predicted` refuses. Both split all " +
	"others. In the paper what is accepted meets the objectives; here what is accepted and misses them counts as " +
	"what is refused."
