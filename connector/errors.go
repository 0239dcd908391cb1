// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"errors"
)

// ErrNoTransfer says that P answered, but its response holds no usable handoff: it is absent, null, of the wrong type
// or incomplete. Real engines die of such handoffs, so decode must never get one.
var ErrNoTransfer = errors.New("no usable KV handoff in the prefill response")

// UnsupportedError says that two engines cannot serve a request together: because of the protocol ([RequestChecker],
// package check), or because of this pair, as Prefill and Decode may find. The flow's policy then decides: one engine
// serves the whole request, or the flow refuses it.
type UnsupportedError struct {
	Member string // the member of the request, or the header, that prevents it
}

// Error names the member.
func (e *UnsupportedError) Error() string {
	return "prefill and decode engines cannot carry this together: " + e.Member
}

// RequestError is a fault of a client's request: the gateway answers 400 and sends nothing to an engine. Its text holds
// names and kinds, never values.
type RequestError struct {
	Param   string // the member at fault, "" for the body as a whole
	Message string
	Err     error // cause, if any
}

// Error returns the message.
func (e *RequestError) Error() string {
	if e.Param == "" {
		return e.Message
	}
	return e.Param + ": " + e.Message
}

// Unwrap returns the cause.
func (e *RequestError) Unwrap() error { return e.Err }
