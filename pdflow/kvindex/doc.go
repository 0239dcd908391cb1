// SPDX-License-Identifier: Apache-2.0

// Package kvindex knows which engine holds the KV of which prompts, from the events that engines publish
// (KV-cache events: vLLM 0.33.0, vllm/distributed/kv_events.py; SGLang 0.5.23, sglang/srt/disaggregation/kv_events.py;
// TensorRT-LLM's main of August 2026, as trtllm.go says).
// docs/kv-index.md says how it works, and what it cannot know.
//
//	index := kvindex.New()
//	index.Apply(source, seq, payload, time.Now())        // one message of the engine's PUB socket
//	hits = index.Match(&kvindex.Query{Model: "m", Tokens: tokens}, hits[:0])
//
// An [Index] has no goroutines, no connections and no clock: who feeds it gives the time, which may be a virtual one.
// Package discovery/kvevents feeds it from engines.
//
// The keys of the index are hashes of its own over the events' token ids, so no hash algorithm or seed of an engine has
// to be known. The hash is keyed by a random secret of each Index, because clients choose the tokens: they cannot make
// prompts that look alike to it, or that crowd a part of its tables.
//
// What is counted as held: blocks of groups of the kind full_attention, or of no kind. A model that has groups of
// another kind, too (sliding window, mamba), can reuse less than Match says, if those groups have dropped what they
// need.
package kvindex
