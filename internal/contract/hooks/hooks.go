// SPDX-License-Identifier: Apache-2.0

// Package hooks is the way by which package connector lets internal/contract, and nobody else, see what is inside its
// types. Package connector sets the variables when it is initialized. Their types have connector's own types in them,
// which this package cannot name: internal/contract does.
package hooks

// What connector gives.
var (
	NewLeg  any // func(*connector.ClientRequest) *connector.Leg
	Leg     any // func(*connector.Leg) *request.Leg
	Request any // func(*connector.ClientRequest) *request.Request
)
