// SPDX-License-Identifier: Apache-2.0

// Package admit keeps a fleet from being given more requests than it can serve. [New] puts limits around a picker:
//
//	picker, err := admit.New(pick.New(set, pick.TwoChoices()), &admit.Options{Adaptive: true})
//	flow, err := pdflow.New(conn, picker)
//
// A request is admitted when its pair is picked, before anything is sent to an engine. An engine that has as many
// requests in flight as its limit allows gets no further one. If all engines of a role are at their limits, requests
// wait, first come first served, and are refused if they would wait too long: an *[pdflow.Error] of
// [pdflow.CodeOverloaded], which a client sees as 503 with Retry-After. A request that names its engine waits for that
// one, and those behind it that others can serve go before it.
//
// Without admission a fleet that gets more than it can serve serves nothing: each request waits at the prefill engine
// until its time is up, and the engine computes prompts for clients whose requests have ended. docs/reliability/
// overload.md has the curve.
//
// The limits are fixed numbers, or found by measuring (Options.Adaptive). A prefill engine's limit, and that of a
// decode engine of which no load is known, follows the engine's latency. By Little's law the latency tells how many of
// the requests in flight run at the engine, and how many wait there: it is compared with the latency that the engine
// has with few requests in flight, since one that is learnt under overload grows with the queue. The limit becomes
// what runs, and a third more to wait, at least two. It begins at 16 for prefill and 256 for decode, grows fast until
// it has been too high once, then by an eighth while requests reach it. Where the limit shrinks and the latency does
// not, the engine has become slower, and that is its latency from now on. A decode engine whose load is known
// (Options.Load) says itself how many requests run and how many wait: the limit becomes what runs.
//
// With Adaptive the number of requests that wait is bounded, too, at first by 24, and during an overload by 8. This
// bounds the wait before any pace is known, in the first second of an overload.
package admit
