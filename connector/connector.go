// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"github.com/pdkit/pdkit/internal/jsonedit"
	"github.com/pdkit/pdkit/internal/request"
)

// KVConnector describes one KV transfer protocol.
//
// The rules, which package connectortest checks among others:
//
//  1. It is an immutable value: all methods may be called concurrently, for any number of sessions.
//  2. Traits always returns the same.
//  3. Prefill and Decode only edit the leg that they are given. They do not dial, block or keep the session.
//  4. No transfer member of the client reaches an engine: the flow has removed them before it calls Prefill or Decode.
//  5. If the error of Decode is [ErrNoTransfer], P's response holds no usable handoff, and the flow does not send the
//     decode leg.
type KVConnector interface {
	// Traits declares what is constant about the connector. A flow calls it once, when it is built.
	Traits() Traits
	// Prefill edits the prefill leg. It starts as the client's request without transfer members, for one token in one
	// whole response, unless Traits.RawPrefill says otherwise.
	Prefill(ctx context.Context, s *Session, leg *Leg) error
	// Decode edits the decode leg, which starts as the client's request without transfer members. p is nil if P has
	// not answered yet.
	Decode(ctx context.Context, s *Session, p *PrefillResult, leg *Leg) error
}

// Order says when the flow sends the two legs.
type Order uint8

// The four orders.
const (
	PrefillThenDecode Order = iota // D's leg is sent after P has answered (NIXL pull, content stores)
	Together                       // both legs are sent at once (Mooncake, SGLang, NIXL push)
	// D's leg is sent first. If its response says that D holds too little of the prompt (see [ColdDetector]), P's leg
	// is sent, and then D's again (NIXL with a hit threshold).
	DecodeFirst
	// D's leg is sent first. If D asks for a prefill by an event, P's leg is sent while D's waits (Ascend layerwise).
	DecodeThenPrefill
)

var orderNames = [...]string{"prefill-then-decode", "together", "decode-first", "decode-then-prefill"}

// String returns the order's name as telemetry shows it.
func (o Order) String() string {
	if int(o) < len(orderNames) {
		return orderNames[o]
	}
	return "unknown"
}

// PrefillResult is P's whole response. Its methods may be called concurrently.
type PrefillResult struct {
	Status int
	Header http.Header
	Body   []byte
	At     time.Time // when its last byte was read; the handoff's age counts from then

	index sync.Once
	doc   jsonedit.Doc
	err   error
}

// Err is not nil if the body is not one well-formed JSON object without duplicate members.
func (p *PrefillResult) Err() error {
	p.index.Do(func() { p.err = p.doc.ParseInto(p.Body) })
	return p.err
}

// Field returns a top-level member's raw value. Members that are null are absent. It finds nothing in a body for which
// Err is not nil.
func (p *PrefillResult) Field(name string) (json.RawMessage, bool) {
	if p == nil || p.Err() != nil {
		return nil, false
	}
	return request.Field(&p.doc, name)
}
