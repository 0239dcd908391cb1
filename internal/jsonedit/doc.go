// SPDX-License-Identifier: Apache-2.0

// Package jsonedit edits a large JSON object without decoding it.
//
// A request body is mostly prompt: megabytes that neither leg of an exchange
// changes. Parse finds the members of the top level by offset; Splice lays a
// leg's edits over them and yields a list of slices, of which the untouched
// ones are the caller's own bytes. Nothing of the prompt is copied or decoded,
// numbers keep their digits, and members keep their order and spelling.
//
// The top level is held to the whole grammar of RFC 8259, and a name may stand
// there once only: where JSON readers disagree about which of two members
// counts, a client could show the gateway one value and the engine another.
// Below the top level only strings and brackets are followed, which is what is
// needed to find where a value ends; whether the rest is well formed is for
// the engine to say.
//
// Names match exactly, byte for byte after unescaping; there is no folding of
// case.
package jsonedit
