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
// first request. If the connector is an io.Closer, the flow calls Close once at its end. A check of the configuration
// never calls either.
type Starter interface {
	Start(ctx context.Context) error
}

// Caller sends a side call. It reaches only the hosts of the session's engines and of URLs among their attributes. A
// call to the server that gets a leg has the leg's header, the client's key included, where r sets none of that name.
// Its transport errors have no addresses.
type Caller func(r *http.Request) (*http.Response, error)

// Preparer makes a side call before the legs (Mooncake's bootstrap query). Prefill and Decode read the value by
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
// The flow calls Expect before it sends the first leg, since the event may come early. wait blocks until the event or
// the end of the context; a nil wait means that this session expects nothing. The flow calls done exactly once, after
// the second leg or after a failure; done answers whoever sent the event.
type Expecter interface {
	Expect(s *Session) (wait func(context.Context) (Event, error), done func(error))
}

// Response is a response to the client that did not come from a decode leg.
type Response struct {
	Body   []byte   // for a client that did not ask for a stream
	Events [][]byte // data of the server-sent events for one that did
}

// PrefillChecker checks P's response in orders where decode does not need it, because both legs run together: P may
// have ended in a way that transfers nothing, and D then waits for minutes. If the error is [ErrNoTransfer], the flow
// cancels decode and tries another pair.
type PrefillChecker interface {
	CheckPrefill(s *Session, p *PrefillResult) error
}

// Finisher makes P's response the client's if P has finished the request (a stop at the first token).
type Finisher interface {
	Final(s *Session, p *PrefillResult) (Response, bool)
}

// Rewriter changes D's response (SGLang's logprobs, LMCache's first token). p returns P's response; if P runs beside D,
// p waits for it, and returns nil if there will be none.
//
// The function that it returns changes the data of one server-sent event, or a whole body that is not streamed. It
// returns the new bytes, or nil to drop the event. data is valid until it returns. The calls for one session come one
// after another. With a nil function the flow does not parse the stream, which is the cheap way: return one only if the
// request needs it.
type Rewriter interface {
	Rewrite(s *Session, p func() *PrefillResult) func(data []byte) ([]byte, error)
}

// Item is one thing to encode before the legs: a media part of a chat.
type Item struct {
	ID   string          // equal items have equal IDs and are encoded once
	Part json.RawMessage // the part as the client sent it
}

// Encoder adds an encode stage before the legs (EPD). The flow sends one leg for each distinct item to the encode
// engines that the picker named. If one of them fails, the request fails.
type Encoder interface {
	Items(s *Session) []Item                             // none: no encode stage
	Encode(s *Session, i Item, leg *Leg) error           // edits an item's leg
	Merge(s *Session, responses []json.RawMessage) error // keeps the responses, in the order of Items, for the legs
}

// RequestChecker checks requests before the picker chooses engines. Its error decides:
//
//   - a *[RequestError] refuses the request with 400, whether two engines or one would serve it, since it would harm an
//     engine (with ExampleConnector, a prompt of one token ends the engine's process);
//   - an *[UnsupportedError] names the member because of which two engines cannot serve the request together; the
//     flow's policy then decides.
//
// A RequestChecker need not repeat what package check finds.
type RequestChecker interface {
	CheckRequest(r *ClientRequest) error
}

// Cleaner frees what a failed session left behind. The flow calls it with a context of its own after both legs have
// ended.
type Cleaner interface {
	Clean(ctx context.Context, s *Session, cause error, call Caller) error
}

// HealthChecker reports whether the connector's own parts work (a listener, a store).
type HealthChecker interface {
	HealthCheck(ctx context.Context) error
}

// ColdDetector reports, for [DecodeFirst], whether D's response asks for a prefill. head is the data of the first event
// that holds more than a role, or the whole body of a response that is not streamed, up to 64 KiB.
type ColdDetector interface {
	Cold(s *Session, status int, head []byte) bool
}

// EndpointChecker reports what is malformed in an engine's entry. It need not repeat that attributes which [Traits]
// declares are missing. Faults are [config.FieldError]s whose paths begin with "attributes."; nil means that there is
// none. check.Endpoint calls it. If Prefill or Decode nevertheless gets such an engine, it returns an attr.Error.
type EndpointChecker interface {
	CheckEndpoint(e discovery.Endpoint) error
}

// As finds an ability in c itself, or in what c wraps (Unwrap() KVConnector or Unwrap() []KVConnector), depth first.
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
