// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// The interfaces of this file are optional abilities of a connector. A flow looks for each of them once, when it is
// built, with [As].

// Starter opens what a connector listens on (a notice socket, a callback server). The flow calls Start once before the
// first request and, if the connector is an io.Closer, Close once at its end. Never called by a configuration check.
type Starter interface {
	Start(ctx context.Context) error
}

// Caller sends a side call. It reaches only the hosts of the session's engines and of URLs among their attributes, and
// returns transport errors without addresses.
type Caller func(r *http.Request) (*http.Response, error)

// Preparer makes a side call before the legs (Mooncake's bootstrap query). Both describers read its value by
// [Session.Prepared].
type Preparer interface {
	Prepare(ctx context.Context, s *Session, call Caller) (any, error)
}

// Event is something that happened outside the two legs: a notice, a callback.
type Event struct {
	Body []byte // as the engine sent it
	At   time.Time
}

// Expecter waits for an outside event between the legs (LMCache's notice, ascend's callback).
//
// Expect arms it, before the first leg is sent, since the event may come early. wait blocks until the event or the
// context's end; a nil wait means that this session expects nothing. done is called exactly once, after the second leg
// or on failure, and answers whoever sent the event.
type Expecter interface {
	Expect(s *Session) (wait func(context.Context) (Event, error), done func(error))
}

// Response is an answer to the client that did not come from a decode leg.
type Response struct {
	Body   []byte   // for a client that did not ask for a stream
	Events [][]byte // data of the server-sent events for one that did
}

// PrefillChecker judges P's answer where decode does not need it, because both legs run together: P may have ended in a
// way that transfers nothing, and D then waits for minutes. The error is [ErrNoTransfer]; the flow cancels decode and
// tries another pair.
type PrefillChecker interface {
	CheckPrefill(s *Session, p *PrefillResult) error
}

// Finisher lets P's answer be the client's, when P has finished the request (a stop at the first token).
type Finisher interface {
	Final(s *Session, p *PrefillResult) (Response, bool)
}

// EventFunc changes one answer: the data of one server-sent event, or a whole body that is not streamed. It returns the
// new bytes, or nil to drop the event. Calls for one session come one after another.
type EventFunc func(data []byte) ([]byte, error)

// Rewriter changes D's answer (SGLang's logprobs, LMCache's first token). p returns P's answer; where P runs beside D
// it waits for it, and returns nil if there will be none. A nil EventFunc leaves the stream unparsed, which is the
// cheap way: return one only if the request needs it.
type Rewriter interface {
	Rewrite(s *Session, p func() *PrefillResult) EventFunc
}

// Item is one thing to encode before the legs: a media part of a chat.
type Item struct {
	ID   string          // equal items have equal IDs and are encoded once
	Part json.RawMessage // the part as the client sent it
}

// Encoder adds an encode stage before the legs (EPD). The flow sends one leg per distinct item to the encode engines
// that the picker named, and fails the request when one of them fails.
type Encoder interface {
	Items(s *Session) []Item                           // none: no encode stage
	Encode(s *Session, i Item, leg *Leg) error         // describes an item's leg
	Merge(s *Session, answers []json.RawMessage) error // keeps the answers, in the order of Items, for the describers
}

// RequestChecker looks at requests before engines are picked. Its error decides:
//
//   - a *[RequestError] refuses the request with 400 however it would be served, since it would harm an engine (with
//     ExampleConnector, a prompt of one token ends the engine's process);
//   - an *[UnsupportedError] names the member for which two engines cannot carry the request together; the flow goes by
//     its policy.
//
// What [Traits.CheckRequest] finds need not be repeated.
type RequestChecker interface {
	CheckRequest(r *Request) error
}

// Cleaner frees what a failed session left behind. It runs on a context of its own after both legs have ended.
type Cleaner interface {
	Clean(ctx context.Context, s *Session, cause error, call Caller) error
}

// HealthChecker tells whether the connector's own parts work (a listener, a store).
type HealthChecker interface {
	HealthCheck(ctx context.Context) error
}

// ColdDetector tells, for [DecodeFirst], whether D's answer asks for a prefill. head is the data of the first event
// that holds more than a role, or the whole body of an answer that is not streamed, up to 64 KiB.
type ColdDetector interface {
	Cold(s *Session, status int, head []byte) bool
}

// EndpointChecker tells what is malformed in an engine's entry. That attributes which [Traits] declares are there, need
// not be repeated. Faults are [config.FieldError]s whose paths begin with "attributes."; nil is good. [CheckEndpoint] asks it.
// A describer that meets such an engine all the same returns an [EndpointError].
type EndpointChecker interface {
	CheckEndpoint(e discovery.Endpoint) error
}

// As finds an ability: in c itself, else in what it wraps (Unwrap() KVConnector or Unwrap() []KVConnector), depth
// first.
func As[T any](c KVConnector) (T, bool) {
	if t, ok := any(c).(T); ok {
		return t, true
	}
	switch w := any(c).(type) {
	case interface{ Unwrap() KVConnector }:
		return As[T](w.Unwrap())
	case interface{ Unwrap() []KVConnector }:
		for _, child := range w.Unwrap() {
			if t, ok := As[T](child); ok {
				return t, true
			}
		}
	}
	var none T
	return none, false
}
