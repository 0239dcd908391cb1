// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// Params is a request's kv_transfer_params as raw JSON, nil when there is none. A connector judges the types itself,
// since engines differ in what they survive.
type Params map[string]json.RawMessage

// Is reports whether a key is there and true.
func (p Params) Is(key string) bool { return string(p[key]) == "true" }

// Has reports whether a key is there, even with null.
func (p Params) Has(key string) bool { _, ok := p[key]; return ok }

// Given reports whether a key is there with a value other than null.
func (p Params) Given(key string) bool { return p.Has(key) && string(p[key]) != "null" }

// Read reads a key's value into v. It reports whether the key is there with a value of that type.
func (p Params) Read(key string, v any) bool { return p.Given(key) && json.Unmarshal(p[key], v) == nil }

// Text is a key's string, "" for anything else.
func (p Params) Text(key string) (text string) {
	p.Read(key, &text)
	return text
}

// Connector is how an engine's scheduler hands KV to other engines and takes it from them: vLLM's KV connector, cut
// down to what a simulation needs.
type Connector interface {
	// Begin looks at a request when it enters the scheduler.
	Begin(g *Generation) Transfer
	// Rejected is called when the API has refused a request with these params.
	Rejected(ctx context.Context, params Params)
	// Freeze stops all conversations with other engines, or lets them go on.
	Freeze(frozen bool)
	// Close ends everything that runs.
	Close()
}

// Transfer is a connector's side of one request.
type Transfer interface {
	// External reports whether another engine has promised the part of the prompt that is not in the engine's own
	// prefix cache.
	External() bool
	// Reported is the prefix cache hit that the other engine had. ok is false if the other engine did not tell.
	Reported() (tokens int, ok bool)
	// Queued is called when the request has to wait for blocks.
	Queued()
	// Load fetches the promised KV into the sequence's blocks. Its error is a *LoadError, a *Death, or the end of ctx.
	Load(ctx context.Context, s *Sequence) error
	// Dropped is called when the request ends before Load. release says that the other engine is to be told.
	Dropped(release bool)
	// Finished is called after the last token. It may pin the sequence's blocks, and it returns the client's
	// kv_transfer_params, or nil.
	Finished(s *Sequence, reason string) any
}

// The interfaces that follow are what a transfer may have besides.

// Arrival looks at a request before it is scheduled. It may end the request, with a finish reason in place of a
// response or with an error.
type Arrival interface {
	Arrived(ctx context.Context, s *Sequence) (reason string, err error)
}

// Partial promises less than the whole rest of the prompt. When the sequence has its blocks and External is true, it
// tells up to which token Load will fill them; the engine computes the rest.
type Partial interface {
	Promised(s *Sequence) (upto int)
}

// Saver is called when a prompt's KV is complete in the sequence's blocks, before the first token is made.
type Saver interface {
	Prefilled(ctx context.Context, s *Sequence)
}

// teller knows the first tokens of a response: the engine gives them out in place of sampled ones.
type teller interface {
	Told() []int32
}

// decorator adds members to a whole response, after Finished.
type decorator interface {
	// Members returns members for the response itself, and choice for each of its choices.
	Members(s *Sequence, reason string) (members, choice python.Object)
}

// LoadError is a KV load that failed. kv_load_failure_policy decides what follows.
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

// NoConnector is an engine on its own, which computes every prompt and ignores params. A connector that embeds it
// writes only what it does.
type NoConnector struct{}

// Begin implements Connector.
func (NoConnector) Begin(*Generation) Transfer { return NoTransfer{} }

// Rejected implements Connector.
func (NoConnector) Rejected(context.Context, Params) {}

// Freeze implements Connector.
func (NoConnector) Freeze(bool) {}

// Close implements Connector.
func (NoConnector) Close() {}

// NoTransfer is a request whose KV comes from nowhere and goes nowhere. A transfer that embeds it writes only what it
// does.
type NoTransfer struct{}

// External implements Transfer.
func (NoTransfer) External() bool { return false }

// Reported implements Transfer.
func (NoTransfer) Reported() (int, bool) { return 0, false }

// Queued implements Transfer.
func (NoTransfer) Queued() {}

// Load implements Transfer.
func (NoTransfer) Load(context.Context, *Sequence) error { return nil }

// Dropped implements Transfer.
func (NoTransfer) Dropped(bool) {}

// Finished implements Transfer.
func (NoTransfer) Finished(*Sequence, string) any { return nil }
