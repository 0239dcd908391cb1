// SPDX-License-Identifier: Apache-2.0

// Package pdflow runs one LLM request over two engines.
//
// A [Flow] joins a connector (what to send), a [Picker] (where to) and a transport (how). It reads a client's
// request once, picks a pair, runs the two legs in the connector's order, streams the response, and cleans up whatever
// happens. Gateways mount it as an http.Handler; schedulers that choose engines themselves call [Flow.Do].
//
//	flow, err := pdflow.New(nixlConnector, pick.New(set, pick.RoundRobin()))
//	http.ListenAndServe("127.0.0.1:8000", flow)
//
// All methods of Flow and Mux may be called concurrently. Every error that leaves the package is an *[Error].
package pdflow
