// SPDX-License-Identifier: Apache-2.0

// Package record keeps decisions of package decide with all that they were decided on, and what came of them, so that
// they can be verified, and played again with another policy. It keeps no prompt and no name of a client: of a prompt,
// its length and keyed hashes of its beginnings.
//
// A file is a sequence of JSON lines: a [Header], a line for each engine whenever its speed is new, and a line of at
// most 400 bytes for each decision.
package record
