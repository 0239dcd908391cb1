// SPDX-License-Identifier: Apache-2.0

// Package connector defines what a KV connector is.
//
// A connector describes one KV transfer protocol between a prefill engine P and a decode engine D: how each leg's
// request differs from the client's, and in which order the two legs are sent. It never sends a leg itself: package
// pdflow runs, cancels, retries, streams and measures the legs and cleans up, in the same way for all connectors.
//
// A new protocol is one small package: implement [KVConnector], declare what is constant in [Traits], add the optional
// abilities that the protocol needs ([Preparer], [Expecter], [Finisher] …), and call [Register] in init for programs
// that choose connectors by name. The packages handoff and attr beside this one read engines' responses and attributes.
package connector
