// SPDX-License-Identifier: Apache-2.0

// Package capacity tells, for each role of a model's engines, how much work waits, how much is done, and how many
// engines are wanted. It reads what engines say of themselves, by discovery/inspect, and sends nothing.
//
//	meter := capacity.New(nil)
//	roles := meter.Observe(time.Now(), set.Load().Endpoints, engines.Reading)
//	fmt.Println(roles[discovery.RolePrefill].Wanted, roles[discovery.RolePrefill].Reason)
//
// Work is measured in tokens, since requests differ by a thousand times: prompt tokens that an engine computes, and
// tokens that it makes. What came from a cache or from another engine is no work. An engine's speed is what it does
// while requests wait in it. From these follows how many engines are wanted: as many as the tokens that come, and those
// that wait, need at [Options].Target of their speed, and as many as the KV needs at Target of their memory. More are
// wanted at once, fewer after [Options].Down. Engines that cannot be asked are taken to be as busy as the others.
//
// Requests that are refused before they reach an engine are not seen. While that is so the engines are saturated, and
// more of them are wanted (by 1/Target), and again when these have come.
package capacity
