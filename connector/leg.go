// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"encoding/json"

	"github.com/pdkit/pdkit/internal/contract/hooks"
	"github.com/pdkit/pdkit/internal/request"
)

// ParamsMember is the request and response member with the parameters of vLLM's connectors.
const ParamsMember = request.ParamsMember

// Leg collects a connector's edits of one leg's request. The flow applies them all at once and copies nothing: members
// that are not edited keep every byte and their order. A Leg belongs to one goroutine.
type Leg struct {
	req *ClientRequest
	in  request.Leg
}

// pdkit's own packages make legs and write them; others get them from a flow, or from package connectortest.
func init() {
	hooks.NewLeg = func(r *ClientRequest) *Leg {
		l := &Leg{req: r}
		l.in.Start(&r.in)
		return l
	}
	hooks.Leg = func(l *Leg) *request.Leg { return &l.in }
	hooks.Request = func(r *ClientRequest) *request.Request { return &r.in }
}

// Request returns the client's request.
func (l *Leg) Request() *ClientRequest { return l.req }

// Set gives a top-level member a raw JSON value. The last Set or Delete of a member wins.
func (l *Leg) Set(member string, raw json.RawMessage) { l.in.Set(member, raw) }

// Delete removes a top-level member, if it is there.
func (l *Leg) Delete(member string) { l.in.Delete(member) }

// Current returns a top-level member with the leg's edits applied. It returns null as null.
func (l *Leg) Current(member string) (json.RawMessage, bool) { return l.in.Current(member) }

// SetAt sets a nested member and creates the objects around it if they are missing. It is for small objects: each call
// copies the outermost one. If a value on the way is neither an object nor null, building the leg fails.
func (l *Leg) SetAt(path []string, raw json.RawMessage) { l.in.SetAt(path, raw) }

// Param sets one key of kv_transfer_params. If a key gets two different values, as from two children of a multi
// connector, building the leg fails.
func (l *Leg) Param(key string, raw json.RawMessage) { l.in.Param(key, raw) }

// Params sets a whole kv_transfer_params object. If no key was set before, it keeps every byte; otherwise it is merged
// key by key, as by [Leg.Param].
func (l *Leg) Params(raw json.RawMessage) { l.in.Params(raw) }

// SetHeader sets a header of the leg and replaces the client's.
func (l *Leg) SetHeader(name, value string) {
	l.in.Headers = append(l.in.Headers, request.Header{Name: name, Value: value})
}

// SetRequestID gives the leg its own X-Request-Id. It sets the header and, for /v1/responses, which ignores the header,
// the member request_id (docs/protocols/vllm.md §2).
func (l *Leg) SetRequestID(id string) {
	l.SetHeader("X-Request-Id", id)
	if l.req.API == APIResponses {
		l.Set("request_id", Quote(id))
	}
}

// SetPath sends the leg to another path than the client's.
func (l *Leg) SetPath(p string) { l.in.Path = p }

// SetBody replaces the client's whole body, for an encode leg.
func (l *Leg) SetBody(raw json.RawMessage) { l.in.Body = raw }

// LimitTokens limits the output to n tokens in the members that the request's API uses. It drops min_tokens, since the
// client's minimum would be an error if it is above the limit.
func (l *Leg) LimitTokens(n int) { l.in.LimitTokens(n) }

// NoStream asks for one whole response. Streams never carry kv_transfer_params (docs/protocols/nixl.md, recording 04),
// and engines refuse stream_options without a stream.
func (l *Leg) NoStream() { l.in.NoStream() }
