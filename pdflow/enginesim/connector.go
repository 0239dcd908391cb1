// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
)

// kvParams is a request's kv_transfer_params, undecoded: a connector judges the
// types itself, since engines differ in what they survive. nil when there is none.
type kvParams map[string]json.RawMessage

func (p kvParams) is(key string) bool { return string(p[key]) == "true" }

func (p kvParams) has(key string) bool { _, ok := p[key]; return ok }

// given says whether the key is there with a value other than null.
func (p kvParams) given(key string) bool { return p.has(key) && string(p[key]) != "null" }

func (p kvParams) text(key string) string {
	var s string
	if json.Unmarshal(p[key], &s) != nil {
		return ""
	}
	return s
}

// connector is how an engine's scheduler hands KV to other engines and takes it
// from them: vLLM's KV connector, cut down to what a simulation needs. One file
// each.
type connector interface {
	// begin looks at a request when it enters the scheduler.
	begin(r *kvRequest) transfer
	// rejected tells that the API layer refused a request with these params.
	rejected(ctx context.Context, params kvParams)
	// freeze stops or resumes the connector's side of all conversations.
	freeze(frozen bool)
	// close ends everything that runs.
	close()
}

// kvRequest is what a connector may know of a request.
type kvRequest struct {
	id     string // the engine's own, with its random suffix
	name   string // the same without the suffix: cmpl-<X-Request-Id>-0
	params kvParams
	prompt []int32
	index  int         // which prompt of the request this is
	header http.Header // of the HTTP request
	path   string
	body   []byte // the whole JSON, for members beside kv_transfer_params; see member
	stream bool
	max    int // tokens of the answer at most
	// local asks to compute the prompt here, whatever the params say: prompt
	// logprobs need it.
	local bool
}

// member gives a top-level member of the request's JSON; nil when it is absent or
// null.
func (r *kvRequest) member(name string) json.RawMessage {
	var members map[string]json.RawMessage
	if json.Unmarshal(r.body, &members) != nil || string(members[name]) == "null" {
		return nil
	}
	return members[name]
}

// The interfaces that follow are what a transfer may have besides.

// arrival is told when a request is about to be scheduled, and may end it: with
// a finish reason in place of an answer, or with an error for the client.
type arrival interface {
	arrived(ctx context.Context, s *sequence) (reason string, err error)
}

// partial promises less than the whole rest of the prompt: asked when the
// sequence has its blocks and external is true, it tells up to which token load
// will fill them. The engine computes what is left.
type partial interface {
	promised(s *sequence) (upto int)
}

// saver is told when a prompt's KV is complete in the sequence's blocks, before
// the first token is made.
type saver interface {
	prefilled(ctx context.Context, s *sequence)
}

// teller knows the first tokens of an answer: they are given out in place of
// sampled ones.
type teller interface {
	told() []int32
}

// decorator adds members to a whole answer, after finished.
type decorator interface {
	// members are added to the answer itself, choice to each of its choices.
	members(s *sequence, reason string) (members, choice map[string]any)
}

// transfer is a connector's side of one request.
type transfer interface {
	// external says whether the part of the prompt that is not in the engine's
	// own prefix cache is promised by another engine.
	external() bool
	// reported is the prefix cache hit that the other engine had, if it told.
	reported() (int, bool)
	// queued is called when the request has to wait for blocks.
	queued()
	// load fetches the promised KV into the sequence's blocks. Its error is a
	// *loadError, an *engineDeath, or the end of ctx.
	load(ctx context.Context, s *sequence) error
	// dropped is called when the request ends before load. The other engine is
	// told to let go, if release says so.
	dropped(release bool)
	// finished is called after the last token; it may pin the sequence's blocks
	// and answers with the kv_transfer_params for the client, or nil.
	finished(s *sequence, reason string) any
}

// loadError is a KV load that failed; kv_load_failure_policy says what follows.
type loadError struct {
	failures, notifications int64 // how the engine's metrics count it
	err                     error
}

func (e *loadError) Error() string { return "enginesim: KV load failed: " + e.err.Error() }
func (e *loadError) Unwrap() error { return e.err }

// engineDeath is an error that an engine core does not survive.
type engineDeath struct{ why string }

func (e *engineDeath) Error() string { return "enginesim: engine core died: " + e.why }

// Reasons for a request to end early, as causes of its context.
var (
	errKilled     = errors.New("enginesim: engine killed")
	errTerminated = errors.New("enginesim: engine terminated")
	errCoreDead   = errors.New("enginesim: engine core dead")
)

// noConnector is an engine on its own: every prompt is computed, params ignored.
type noConnector struct{}

func (noConnector) begin(*kvRequest) transfer          { return noTransfer{} }
func (noConnector) rejected(context.Context, kvParams) {}
func (noConnector) freeze(bool)                        {}
func (noConnector) close()                             {}

type noTransfer struct{}

func (noTransfer) external() bool                        { return false }
func (noTransfer) reported() (int, bool)                 { return 0, false }
func (noTransfer) queued()                               {}
func (noTransfer) load(context.Context, *sequence) error { return nil }
func (noTransfer) dropped(bool)                          {}
func (noTransfer) finished(*sequence, string) any        { return nil }
