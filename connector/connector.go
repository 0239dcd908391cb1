// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// KVConnector describes one KV transfer protocol.
//
// Rules, which package connectortest checks, and more besides:
//
//  1. It is an immutable value: all methods may be called concurrently, for any number of sessions.
//  2. Traits are constant.
//  3. Prefill and Decode only edit the leg they are given. They do not dial, block or keep the session.
//  4. Nothing of the client's own transfer members reaches an engine; the flow has removed them before either call.
//  5. An error of Decode that is [ErrNoTransfer] means that P's answer holds no usable handoff. The flow then never
//     sends the decode leg as it is.
type KVConnector interface {
	// Traits declares what is constant about the connector. A flow asks for them once, when it is built.
	Traits() Traits
	// Prefill edits the prefill leg, which starts as the client's request without transfer members.
	Prefill(ctx context.Context, s *Session, leg *Leg) error
	// Decode edits the decode leg, which starts the same way. p is nil unless P answered before.
	Decode(ctx context.Context, s *Session, p *PrefillResult, leg *Leg) error
}

// Order is how the two legs stand in time.
type Order uint8

// The four orders.
const (
	PrefillThenDecode Order = iota // D is sent once P has answered (NIXL pull, content stores)
	Together                       // both are sent at once (Mooncake, SGLang, NIXL push)
	DecodeFirst                    // D is sent; on a cold answer P, then D again (a store with a hit threshold)
	DecodeThenPrefill              // D is sent and waits; its event, or nothing, starts P (ascend layerwise)
)

var orderNames = [...]string{"prefill-then-decode", "together", "decode-first", "decode-then-prefill"}

// String returns the order's name as telemetry shows it.
func (o Order) String() string {
	if int(o) < len(orderNames) {
		return orderNames[o]
	}
	return "unknown"
}

// PrefillResult is P's whole answer.
type PrefillResult struct {
	Status int
	Header http.Header
	Body   []byte
	At     time.Time // when its last byte was read: the handoff's age counts from here

	doc *jsonedit.Doc
	err error
}

// NewPrefillResult indexes an answer. A body that is not one JSON object is no error here: Err tells it, and Field
// then finds nothing.
func NewPrefillResult(status int, header http.Header, body []byte, at time.Time) *PrefillResult {
	p := &PrefillResult{Status: status, Header: header, Body: body, At: at}
	p.doc, p.err = jsonedit.Parse(body)
	return p
}

// Err is not nil if the body is not one well-formed JSON object without duplicate members.
func (p *PrefillResult) Err() error { return p.err }

// Field returns a top-level member's raw value. Members that are null are absent.
func (p *PrefillResult) Field(name string) (json.RawMessage, bool) {
	if p == nil || p.doc == nil || p.err != nil {
		return nil, false
	}
	return field(p.doc, name)
}

func field(d *jsonedit.Doc, name string) (json.RawMessage, bool) {
	raw, ok := d.Get(name)
	if !ok || jsonedit.Kind(raw) == jsonedit.Null {
		return nil, false
	}
	return raw, true
}
