// SPDX-License-Identifier: Apache-2.0

// Package connector says what a KV connector is.
//
// A connector describes one KV transfer protocol between a prefill engine P and a decode engine D: how each leg's
// request differs from the client's, and how the two legs stand in time. It never sends anything itself: package pdflow
// runs the legs, cancels, retries, streams, times and cleans up, for all connectors alike.
//
// A new protocol is one small package: implement [KVConnector], declare what is constant in [Traits], add the optional
// abilities the protocol needs ([Preparer], [Expecter], [Finisher] …), and call [Register] in init for those who
// configure by name. Packages handoff and attr beside this one read what engines say.
package connector
