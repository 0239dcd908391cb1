// SPDX-License-Identifier: Apache-2.0

// Package jsonedit edits a large JSON object without decoding it.
//
// A request body is mostly prompt: megabytes that neither leg of a request changes. Parse finds the members of the top
// level by offset; Splice lays a leg's edits over them and yields a list of slices, of which the untouched ones are the
// caller's own bytes. Nothing of the prompt is copied or decoded, numbers keep their digits, and members keep their
// order and spelling.
//
// The top level is held to the whole grammar of RFC 8259, and a name may stand there once only: where JSON readers
// disagree about which of two members counts, a client could show the gateway one value and the engine another. Below
// the top level only strings and brackets are followed, which is what is needed to find where a value ends; whether the
// rest is well formed is for the engine to say.
//
// Names match exactly, byte for byte after unescaping; there is no folding of case.
//
// # Why not sjson
//
// sjson edits small documents here: handoffs, responses, events. It is never given a client's body, for two reasons.
//
// It copies the document for each edit. A prefill leg has six (stream, stream_options, max_tokens,
// max_completion_tokens, kv_transfer_params, request_id). Parse and Splice, against six calls of sjson v1.2.5:
//
//	body                      Parse and Splice      sjson, six times
//	chat, 2 KB                   2 µs,   0 B         9.4 µs,  18 KB
//	chat, 200 KB                55 µs,   0 B         530 µs, 1.2 MB
//	chat, 5 MB                 1.1 ms,   5 B          11 ms,  32 MB
//	one image, 5 MB           0.09 ms,   0 B          12 ms,  32 MB
//	nothing but escapes, 5 MB  5.8 ms,  24 B          19 ms,  32 MB
//
// (BenchmarkParseSplice and BenchmarkSjson, medians; Go 1.26, two cores of a shared virtual machine: the ratios count.)
// The slices go to the connection as they are; one copy of 5 MB into fresh memory would cost 1.5 ms more.
//
// And it is silent where a client could cheat. Of two members of one name it edits or removes the first, and Python
// reads the last: stream stays true, and a client's kv_transfer_params survives its removal. It drops text after the
// object, makes an object of null, and returns broken JSON as it was, all without an error.
// TestSjsonIsSilentWhereAClientCouldCheat holds it to that.
package jsonedit
