// SPDX-License-Identifier: Apache-2.0

// Package decide says whether a request is split between a prefill and a decode engine, which engines serve it, and
// whether it is refused. A [Policy] is a pure function of an [Input]: package decide needs no flow, no HTTP and no
// clock for it, so any scheduler, simulator or verifier can ask the same one. examples/scorers has three.
//
// [New] puts a policy around a picker, as package admit puts limits:
//
//	inner := pick.New(set, pick.PrefixAffinity(), pick.WithCandidates())
//	picker, err := decide.New(inner, decide.Threshold(1024, 0), nil)
//	flow, err := pdflow.New(conn, picker)
//
// What a connector forbids stays forbidden: a decode engine that cannot prefill is never to serve alone.
package decide
