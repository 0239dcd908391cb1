// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
)

// Params is a request's kv_transfer_params, undecoded: a connector judges the
// types itself, since engines differ in what they survive. nil when there is none.
type Params map[string]json.RawMessage

func (p Params) Is(key string) bool { return string(p[key]) == "true" }

func (p Params) Has(key string) bool { _, ok := p[key]; return ok }

// Given says whether the key is there with a value other than null.
func (p Params) Given(key string) bool { return p.Has(key) && string(p[key]) != "null" }

func (p Params) Text(key string) string {
	var s string
	if json.Unmarshal(p[key], &s) != nil {
		return ""
	}
	return s
}

// Connector is how an engine's scheduler hands KV to other engines and takes it
// from them: vLLM's KV connector, cut down to what a simulation needs. One file
// each.
type Connector interface {
	// Begin looks at a request when it enters the scheduler.
	Begin(r *Request) Transfer
	// Rejected tells that the API layer refused a request with these params.
	Rejected(ctx context.Context, params Params)
	// Freeze stops or resumes the connector's side of all conversations.
	Freeze(frozen bool)
	// Close ends everything that runs.
	Close()
}

// Request is what a connector may know of a request.
type Request struct {
	ID     string // the engine's own, with its random suffix
	Name   string // the same without the suffix: cmpl-<X-Request-Id>-0
	Params Params
	Prompt []int32
	index  int         // which prompt of the request this is
	Header http.Header // of the HTTP request
	Path   string
	body   []byte // the whole JSON, for members beside kv_transfer_params; see member
	stream bool
	max    int // tokens of the answer at most
	// Local asks to compute the prompt here, whatever the params say: prompt
	// logprobs need it.
	Local bool
}

// Member gives a top-level member of the request's JSON; nil when it is absent or
// null.
func (r *Request) Member(name string) json.RawMessage {
	var members map[string]json.RawMessage
	if json.Unmarshal(r.body, &members) != nil || string(members[name]) == "null" {
		return nil
	}
	return members[name]
}

// The interfaces that follow are what a transfer may have besides.

// Arrival is told when a request is about to be scheduled, and may end it: with
// a finish reason in place of an answer, or with an error for the client.
type Arrival interface {
	Arrived(ctx context.Context, s *Sequence) (reason string, err error)
}

// Partial promises less than the whole rest of the prompt: asked when the
// sequence has its blocks and external is true, it tells up to which token load
// will fill them. The engine computes what is left.
type Partial interface {
	Promised(s *Sequence) (upto int)
}

// Saver is told when a prompt's KV is complete in the sequence's blocks, before
// the first token is made.
type Saver interface {
	Prefilled(ctx context.Context, s *Sequence)
}

// teller knows the first tokens of an answer: they are given out in place of
// sampled ones.
type teller interface {
	Told() []int32
}

// decorator adds members to a whole answer, after finished.
type decorator interface {
	// Members are added to the answer itself, choice to each of its choices.
	Members(s *Sequence, reason string) (members, choice map[string]any)
}

// Transfer is a connector's side of one request.
type Transfer interface {
	// External says whether the part of the prompt that is not in the engine's
	// own prefix cache is promised by another engine.
	External() bool
	// Reported is the prefix cache hit that the other engine had, if it told.
	Reported() (int, bool)
	// Queued is called when the request has to wait for blocks.
	Queued()
	// Load fetches the promised KV into the sequence's blocks. Its error is a
	// *loadError, an *engineDeath, or the end of ctx.
	Load(ctx context.Context, s *Sequence) error
	// Dropped is called when the request ends before load. The other engine is
	// told to let go, if release says so.
	Dropped(release bool)
	// Finished is called after the last token; it may pin the sequence's blocks
	// and answers with the kv_transfer_params for the client, or nil.
	Finished(s *Sequence, reason string) any
}

// LoadError is a KV load that failed; kv_load_failure_policy says what follows.
type LoadError struct {
	Failures, Notifications int64 // how the engine's metrics count it
	Err                     error
}

func (e *LoadError) Error() string { return "enginesim: KV load failed: " + e.Err.Error() }
func (e *LoadError) Unwrap() error { return e.Err }

// Death is an error that an engine core does not survive.
type Death struct{ Why string }

func (e *Death) Error() string { return "enginesim: engine core died: " + e.Why }

// Reasons for a request to end early, as causes of its context.
var (
	ErrKilled     = errors.New("enginesim: engine killed")
	ErrTerminated = errors.New("enginesim: engine terminated")
	ErrCoreDead   = errors.New("enginesim: engine core dead")
)

// NoConnector is an engine on its own: every prompt is computed, params ignored.
type NoConnector struct{}

func (NoConnector) Begin(*Request) Transfer          { return NoTransfer{} }
func (NoConnector) Rejected(context.Context, Params) {}
func (NoConnector) Freeze(bool)                      {}
func (NoConnector) Close()                           {}

type NoTransfer struct{}

func (NoTransfer) External() bool                        { return false }
func (NoTransfer) Reported() (int, bool)                 { return 0, false }
func (NoTransfer) Queued()                               {}
func (NoTransfer) Load(context.Context, *Sequence) error { return nil }
func (NoTransfer) Dropped(bool)                          {}
func (NoTransfer) Finished(*Sequence, string) any        { return nil }
