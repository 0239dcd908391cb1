// SPDX-License-Identifier: Apache-2.0

// Package enginesim simulates inference engines that really hold and move KV.
//
// An [Engine] serves the HTTP surface of vLLM 0.32.0 with a deterministic toy model: one byte of a completion's prompt
// is one token, and every next token is a hash over the content of all KV blocks that the request holds. The blocks are
// real memory, paged, counted, cached by prefix and reused. So a decode with a handoff that is wrong, stale or used
// twice gives wrong text, as a real engine's does, and one with the right handoff gives the text of one engine alone.
//
// The model calls tools and fills in schemas on demand: where tool_choice names a function, or is "required"
// (Messages: "any"), a chat, a message or a response calls it, or each of its tools once; where response_format
// (output_config.format, text.format) is JSON, the text is JSON of that schema. The strings and numbers in it are the
// model's own, and so depend on the KV, too. With tool_choice "auto" it writes text.
//
// With [Config.KeepResponses] an engine remembers its responses of /v1/responses, and no other engine knows them.
//
// This package is the face. The rooms behind it are internal: core has the KV, the scheduler, and the pipe and the
// lookup buffer through which KV moves between two engines over TCP; api has a file for each client API; proto has what
// the protocols of pdkit's connectors share, and a package for each family of them; server runs one life of an engine.
//
// Responses, errors, metrics and the ways to fail follow exchanges recorded from vLLM 0.32.0. What was not recorded is
// made after vLLM's sources and may differ in detail: the events of responses, messages and generate streams, the texts
// of errors beyond those in testdata, and whole responses cut short by SIGTERM. Where a real engine computes prompts in
// batches, here each request takes its own time, unless [Config.Timing] says what steps take. Package
// model has the time and the memory of an engine as values; package virtual runs a fleet of them without a clock,
// package pace one in real time. [Engine.Inject] scripts faults; [Engine.CheckKV] tells whether every handoff was used
// exactly once.
package enginesim
