// SPDX-License-Identifier: Apache-2.0

// Package transport sends the legs of a request to engines.
//
// A [Transport] is an [http.RoundTripper] with a pool sized for many engines, TLS and mTLS, one limit for the whole of
// connecting, and nothing a hop between a gateway and its engines must not have: no proxy from the environment, no
// redirects, no compression, no cookies.
//
// Each of its errors is an [*Error] that says how far the request got, which is what decides whether it may be sent
// again:
//
//	SentNothing   provably no byte of the request left: repeat it anywhere
//	SentMaybe     the engine may have it, and may have started on it
//	SentAnswered  the head of a response arrived; its body then failed
//
// HTTP/1.1 is the package's own, in the callers' goroutines and with buffers held only while something is in them: a
// gateway's cost is mostly that of its connections. Responses are read more strictly than net/http does where two
// readers could differ about a response's end. HTTP/2 is net/http's.
//
// A [Retrier] repeats what was not sent, and nothing else.
//
// [NewListener] gives a server of streams connections of its clients that are as cheap as those to engines.
//
// The package knows neither connectors nor flows.
package transport
