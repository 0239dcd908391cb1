// SPDX-License-Identifier: Apache-2.0

// Package check says what a connector's protocol allows: which requests two engines can serve together, which engines
// can take part, and which pairs of them can exchange KV. A flow and package pick ask it; so may a scheduler that picks
// by itself, and a program that reads a list of engines. All functions may be called concurrently.
package check

import "github.com/pdkit/pdkit/connector"

// Rules are what one connector allows.
type Rules struct {
	Traits    connector.Traits
	requests  connector.RequestChecker
	endpoints connector.EndpointChecker
}

// Of returns a connector's rules. It asks for the connector's Traits once.
func Of(c connector.KVConnector) *Rules {
	r := &Rules{Traits: c.Traits()}
	r.requests, _ = connector.As[connector.RequestChecker](c)
	r.endpoints, _ = connector.As[connector.EndpointChecker](c)
	return r
}
