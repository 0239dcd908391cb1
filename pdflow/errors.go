// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/verdict"
)

// Code says what went wrong, for programs. It is the "code" member of the error object of OpenAI's APIs, unless an
// engine refused the request: then that member is the engine's own, which vLLM writes as a number. A Code is an error
// by itself: errors.Is(err, pdflow.CodeTimeout) tells an error's code, and a picker may return CodeNoEndpoint.
type Code string

// Error returns the code.
func (c Code) Error() string { return string(c) }

// The codes, with the HTTP status they become.
const (
	CodeInvalid         Code = "invalid_request"        // 400: the client's body or header
	CodeUnsupported     Code = "unsupported"            // 400: two engines cannot carry it, and the policy says refuse
	CodeNotFound        Code = "not_found"              // 404: no such path or model
	CodeNoResponse      Code = "response_not_found"     // 404: no engine has the response that the request refers to
	CodeBodyTimeout     Code = "body_timeout"           // 408: the client's body did not come
	CodeTooLarge        Code = "body_too_large"         // 413
	CodeMediaType       Code = "unsupported_media_type" // 415
	CodeClientGone      Code = "client_gone"            // 499: the client left; nobody sees it
	CodeInternal        Code = "internal"               // 500: a fault of a connector or of pdkit
	CodePrefillRejected Code = "prefill_rejected"       // P's own 4xx
	CodePrefillFailed   Code = "prefill_failed"         // 502
	CodeEncodeFailed    Code = "encode_failed"          // 502
	CodeTransferMissing Code = "transfer_missing"       // 502: P answered, without a usable handoff
	CodeHandoffExpired  Code = "handoff_expired"        // 502: the handoff got older than its lease allows
	CodeDecodeRejected  Code = "decode_rejected"        // D's own 4xx
	CodeDecodeFailed    Code = "decode_failed"          // 502, or D's own 5xx
	CodeStreamBroken    Code = "stream_broken"          // D broke after the first byte; the connection is cut
	CodeNoEndpoint      Code = "no_endpoint"            // 503
	CodeDraining        Code = "draining"               // 503
	CodeOverloaded      Code = "overloaded"             // 503: refused by a limit, nothing was sent
	CodeTimeout         Code = "timeout"                // 504
	CodeForgotten       Code = "forgotten"              // the caller of Flow.Begin made no call for too long
	CodeCanceled        Code = "canceled"               // a leg that nobody needed any more; never a request's
)

// LegKind names a leg.
type LegKind string

// The legs.
const (
	LegPrefill LegKind = "prefill"
	LegDecode  LegKind = "decode"
	LegEncode  LegKind = "encode"
)

// Error is every error that leaves this package. Its text holds no prompt, key, body or address.
type Error struct {
	Code       Code
	Leg        LegKind       // "" where no leg is at fault
	Phase      string        // what was being done: connect, send, response, handoff, event, transfer, stream …
	Connector  string        // connector's name
	Endpoint   string        // the engine's ID, for operators: not written to clients
	Status     int           // the engine's status, 0 if it gave none
	RetryAfter time.Duration // what a 503 asks the client to wait
	Param      string        // the member of the request at fault
	Message    string        // safe to show a client
	Err        error         // cause

	api     connector.API // of a request to Do; elsewhere the request's path tells it
	caller  bool          // the caller's own deadline: no fault of an engine
	mode    Mode          // how the request was served when it failed
	engine  *engineError  // the engine's own error, to be passed on
	wait    time.Duration // for which the engine wants to be left alone: its Retry-After
	scope   verdict.Scope // of what the engine's refusal speaks
	short   int           // the length of the refusing engine's context, if it speaks of that
	all     bool          // the decode engine's is no longer
	doubted bool          // the engine has refused each of its last requests
	proven  bool          // another engine serves what this one refuses
}

// engineError is what passes of an engine's response with an error status.
type engineError struct {
	status     int
	retryAfter string
	said       *verdict.Fault // nil: nothing that a client may know
}

// Error returns the code and what is known of leg and status. The cause, whose text is not ours, is Unwrap's.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("pdflow: " + string(e.Code))
	if e.Leg != "" {
		fmt.Fprintf(&b, " on the %s leg", e.Leg)
	}
	if e.Phase != "" {
		fmt.Fprintf(&b, " (%s)", e.Phase)
	}
	if e.Status != 0 {
		fmt.Fprintf(&b, ", engine status %d", e.Status)
	}
	if e.Param != "" {
		fmt.Fprintf(&b, ", member %s", e.Param)
	}
	if e.Message != "" {
		b.WriteString(": " + e.Message)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is matches the error's code: errors.Is(err, pdflow.CodeTimeout).
func (e *Error) Is(target error) bool {
	code, ok := target.(Code) // errors.Is unwraps
	return ok && code == e.Code
}

// LogValue logs the error's fields without its cause, whose text is not ours.
func (e *Error) LogValue() slog.Value {
	return slog.GroupValue(slog.String("code", string(e.Code)), slog.String("leg", string(e.Leg)),
		slog.String("phase", e.Phase), slog.String("endpoint", e.Endpoint), slog.Int("status", e.Status),
		slog.String("message", e.Message))
}

// clone is for a context's cause: whoever sends a step may read that while the request's end still writes to e.
func (e *Error) clone() *Error {
	same := *e
	return &same
}

// of notes the API in whose shape the error is to be written.
func (e *Error) of(api connector.API) *Error {
	e.api = api
	return e
}

// HTTPStatus returns the status that the error becomes towards a client.
func (e *Error) HTTPStatus() int {
	if e.engine != nil {
		return e.engine.status
	}
	switch e.Code {
	case CodeInvalid, CodeUnsupported:
		return http.StatusBadRequest
	case CodeNotFound, CodeNoResponse:
		return http.StatusNotFound
	case CodeBodyTimeout:
		return http.StatusRequestTimeout
	case CodeTooLarge:
		return http.StatusRequestEntityTooLarge
	case CodeMediaType:
		return http.StatusUnsupportedMediaType
	case CodeClientGone:
		return 499
	case CodeNoEndpoint, CodeDraining, CodeOverloaded:
		return http.StatusServiceUnavailable
	case CodeTimeout:
		return http.StatusGatewayTimeout
	case CodePrefillFailed, CodePrefillRejected, CodeEncodeFailed, CodeTransferMissing, CodeHandoffExpired,
		CodeDecodeFailed, CodeDecodeRejected, CodeStreamBroken:
		return http.StatusBadGateway
	}
	return http.StatusInternalServerError
}

// EngineFault reports whether the failure is of the engines' making, so that it counts against them.
func (e *Error) EngineFault() bool {
	switch e.Code {
	case CodePrefillFailed, CodeTransferMissing, CodeDecodeFailed, CodeStreamBroken, CodeEncodeFailed, CodeTimeout:
		return !e.caller
	}
	return e.proven
}

// ModelMissing reports whether the engine at fault (Endpoint) does not have the model that the request names: a LoRA
// adapter, say, that only others have loaded. [pick.New]'s pickers remember it for that engine and that model.
func (e *Error) ModelMissing() bool { return e.scope == verdict.ScopeModel }

// hung reports whether D did not begin in time although P had answered: their transfer may never end.
func (e *Error) hung() bool { return e.Code == CodeTimeout && e.Phase == phaseTransfer }

// retryable reports whether another pair, with a new prefill, may serve the request. Of timeouts attempt.retryReason
// decides. A connection that could not be made in time is no timeout, but a failed leg.
func (e *Error) retryable() bool {
	switch e.Code {
	case CodePrefillFailed, CodeTransferMissing, CodeHandoffExpired, CodeDecodeFailed:
		return true
	}
	return false
}

// nobody reports whether a picker found no engines, or none that has the model.
func (e *Error) nobody() bool { return e.Code == CodeNoEndpoint || e.Code == CodeNotFound }

// fallbackable reports whether the fallback policy applies, because no pair could serve with KV transfer.
func (e *Error) fallbackable() bool {
	return e.retryable() || e.hung() || e.Code == CodeNoEndpoint ||
		e.Code == CodePrefillRejected && e.scope.OfEngine() && !e.all
}

// errorType is the "type" member of OpenAI's error object.
func (e *Error) errorType() string {
	switch e.Code {
	case CodePrefillRejected, CodeDecodeRejected, CodeInvalid, CodeUnsupported, CodeTooLarge, CodeMediaType,
		CodeNotFound, CodeNoResponse, CodeBodyTimeout:
		return "invalid_request_error"
	case CodeNoEndpoint, CodeDraining, CodeOverloaded:
		return "service_unavailable_error"
	}
	return "api_error"
}

var anthropicTypes = map[int]string{401: "authentication_error", 403: "permission_error", 404: "not_found_error",
	413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error"}

// anthropicType is the "type" member of Anthropic's error object, in whose API each type has one status.
func anthropicType(status int) string {
	switch t := anthropicTypes[status]; {
	case t != "":
		return t
	case status >= 400 && status < 500:
		return "invalid_request_error"
	}
	return "api_error"
}

// clientMessage is what a client may know. It never holds an address or an engine's ID.
func (e *Error) clientMessage() string {
	if e.Message != "" {
		if e.Param != "" {
			return e.Param + ": " + e.Message
		}
		return e.Message
	}
	return strings.ReplaceAll(string(e.Code), "_", " ")
}
