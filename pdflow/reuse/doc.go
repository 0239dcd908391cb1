// SPDX-License-Identifier: Apache-2.0

// Package reuse proves that decode engines take the KV of prefill engines over, instead of computing each prompt again.
//
// A gateway cannot see that: with a store that is not shared, with hash seeds that differ, with a notice that is lost,
// all responses are 200 and all texts are right, and each prompt is computed twice. The engines' own counters tell.
// [Verify] sends synthetic probes: requests whose prompts no engine has seen. It reads the metrics of both engines
// before and after each, and compares the text with that of one engine alone. Its [Report] says how many of the
// prompts' tokens decode took over and how many bytes moved, and if none did, the likely reason and what to do about
// it. [SyntheticProber] does the same at a low rate beside live traffic, and records a metric.
//
// Proof is what an engine counts after the fact. vLLM's prompt_tokens_by_source_total{source="external_kv_transfer"} is
// such a counter; external_prefix_cache_hits_total counts promises, and rises when the load then fails (vLLM 0.32.0,
// docs/protocols/nixl.md §3).
package reuse
