// SPDX-License-Identifier: Apache-2.0

package trtllm

import (
	"bytes"
	"encoding/json"
	"sync"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// transfer is what D needs from P's response.
type transfer struct {
	params    json.RawMessage
	promptIDs json.RawMessage // nil if P returned none: D then tokenizes the prompt itself
	usage     json.RawMessage // nil if P returned none, or its release has no place for it
}

// docs are reusable indexes of small objects: every request reads a handoff.
var docs = sync.Pool{New: func() any { return new(jsonedit.Doc) }}

// withObject indexes an object for one call of use. ok is false if raw is not an object or has a member twice.
func withObject(raw json.RawMessage, use func(d *jsonedit.Doc) error) (ok bool, err error) {
	d := docs.Get().(*jsonedit.Doc)
	defer func() { d.Reset(); docs.Put(d) }()
	if len(raw) == 0 || d.ParseInto(raw) != nil {
		return false, nil
	}
	return true, use(d)
}

// withChoice reads the choice of P's response. There must be exactly one.
func withChoice(p *connector.PrefillResult, use func(choice *jsonedit.Doc) error) error {
	if p.Err() != nil {
		return handoff.NoTransfer("the response is not one JSON object")
	}
	raw, _ := p.Field("choices")
	if jsonedit.Kind(raw) != jsonedit.Array {
		return handoff.NoTransfer("the response has no choices")
	}
	// With exactly one choice there is one object between the brackets, and nothing else.
	ok, err := withObject(bytes.Trim(raw[1:len(raw)-1], " \t\r\n"), use)
	if !ok {
		return handoff.NoTransfer("the response must have exactly one choice, an object without duplicate members")
	}
	return err
}

// readHandoff checks what the official server checks, and the types with which D would fail. The error names members,
// never values. id is the attempt's; a handoff with another id is another request's KV.
func readHandoff(p *connector.PrefillResult, id uint64) (h transfer, err error) {
	err = withChoice(p, func(choice *jsonedit.Doc) error {
		if gaveUp(choice) {
			return errGaveUp
		}
		h.params, _ = given(choice, paramsMember)
		return nil
	})
	if err != nil {
		return h, err
	}
	// The official server reads it from the choice. AIBrix also accepts responses that have it at the top level.
	if h.params == nil {
		h.params, _ = p.Field(paramsMember)
	}
	if h.params == nil {
		return h, handoff.NoTransfer("disaggregated_params is absent or null")
	}
	if !utf8.Valid(h.params) {
		return h, handoff.NoTransfer("disaggregated_params is not UTF-8")
	}
	var takesUsage bool
	ok, err := withObject(h.params, func(d *jsonedit.Doc) error {
		_, takesUsage = d.Get("ctx_usage") // a null also shows that P's release, and so D's, has the member
		return checkParams(d, id)
	})
	if !ok {
		return h, handoff.NoTransfer("disaggregated_params is not an object without duplicate members")
	}
	if err != nil {
		return h, err
	}
	if ids, ok := p.Field("prompt_token_ids"); ok {
		if !handoff.TokenIDs(ids) {
			return h, handoff.NoTransfer("prompt_token_ids is not a list of token ids")
		}
		h.promptIDs = ids
	}
	if usage, ok := p.Field("usage"); ok {
		if jsonedit.Kind(usage) != jsonedit.Object || !handoff.WellFormed(usage) {
			return h, handoff.NoTransfer("usage is not an object")
		}
		if takesUsage {
			h.usage = usage
		}
	}
	return h, nil
}

// checkParams requires the types of DisaggregatedParams (openai_protocol.py). With others D fails, or refuses the
// request with a 4xx, which would look like the client's fault.
func checkParams(d *jsonedit.Doc, id uint64) error {
	v, ok := given(d, "ctx_request_id")
	if !ok {
		return handoff.NoTransfer("ctx_request_id is absent or null")
	}
	if n, isInt := jsonedit.Int(v); !isInt || n < 0 {
		return handoff.NoTransfer("ctx_request_id is not a 64-bit id")
	}
	// A release that does not tell it back has no such member or null in it; its D finds the KV by ctx_request_id.
	if v, told := given(d, "disagg_request_id"); told && !isID(v, id) {
		return handoff.NoTransfer("disagg_request_id is not this session's")
	}
	if v, ok := given(d, "first_gen_tokens"); !ok || !handoff.TokenIDs(v) {
		return handoff.NoTransfer("first_gen_tokens is not a list of token ids")
	}
	if v, ok := given(d, "draft_tokens"); ok && !handoff.TokenIDs(v) && !isEmptyList(v) {
		return handoff.NoTransfer("draft_tokens is not a list of token ids")
	}
	if v, ok := given(d, "ctx_dp_rank"); ok {
		if n, isInt := jsonedit.Int(v); !isInt || n < 0 {
			return handoff.NoTransfer("ctx_dp_rank is not a rank")
		}
	}
	if v, ok := given(d, "encoded_opaque_state"); ok && jsonedit.Kind(v) != jsonedit.String {
		return handoff.NoTransfer("encoded_opaque_state is not a string")
	}
	if v, ok := given(d, "ctx_info_endpoint"); ok && jsonedit.Kind(v) != jsonedit.String &&
		jsonedit.Kind(v) != jsonedit.Array {
		return handoff.NoTransfer("ctx_info_endpoint is neither a string nor a list")
	}
	if !wellFormed(d) {
		return handoff.NoTransfer("disaggregated_params is not well-formed JSON")
	}
	return nil
}

func isID(raw json.RawMessage, id uint64) bool {
	n, ok := jsonedit.Int(raw)
	return ok && uint64(n) == id
}

func isEmptyList(raw json.RawMessage) bool {
	return jsonedit.Kind(raw) == jsonedit.Array && len(bytes.Trim(raw[1:len(raw)-1], " \t\r\n")) == 0
}

// wellFormed checks nested values.
func wellFormed(d *jsonedit.Doc) bool {
	for i := range d.Len() {
		switch v := d.Value(i); jsonedit.Kind(v) {
		case jsonedit.Object, jsonedit.Array:
			if !handoff.WellFormed(v) {
				return false
			}
		}
	}
	return true
}

func given(d *jsonedit.Doc, name string) (json.RawMessage, bool) {
	v, ok := d.Get(name)
	if !ok || jsonedit.Kind(v) == jsonedit.Null {
		return nil, false
	}
	return v, true
}

// edited returns an object with some members set, in one pass.
func edited(raw json.RawMessage, edits ...jsonedit.Edit) (out json.RawMessage, err error) {
	ok, err := withObject(raw, func(d *jsonedit.Doc) error {
		s := segments.Get().(*jsonedit.Segments)
		defer func() { s.Reset(); segments.Put(s) }()
		d.Splice(edits, s)
		out = s.AppendTo(make([]byte, 0, s.Len()))
		return nil
	})
	if !ok {
		return nil, handoff.NoTransfer("disaggregated_params is not an object without duplicate members")
	}
	return out, err
}

var segments = sync.Pool{New: func() any { return new(jsonedit.Segments) }}

func finishReason(choice *jsonedit.Doc) string {
	raw, ok := choice.Get("finish_reason")
	if !ok || jsonedit.Kind(raw) != jsonedit.String {
		return ""
	}
	reason, _ := jsonedit.Unquote(raw)
	return reason
}

// gaveUp reports whether P ended without a result: the request is not finished, and D cannot continue it.
func gaveUp(choice *jsonedit.Doc) bool {
	switch finishReason(choice) {
	case "cancelled", "timeout", "abort", "error":
		return true
	}
	return false
}

// isFinal reports whether P has finished the request. P ends by length if D is to continue, so every other end is
// final.
func isFinal(choice *jsonedit.Doc) bool {
	switch finishReason(choice) {
	case "", "length", "not_finished":
		return false
	}
	return !gaveUp(choice)
}

var errGaveUp = handoff.NoTransfer("the prefill engine gave the request up")

// CheckPrefill refuses a response in which P says that it gave up. With generation first D would wait for a transfer
// that never comes.
func (*Connector) CheckPrefill(_ *connector.Session, p *connector.PrefillResult) error {
	return withChoice(p, func(choice *jsonedit.Doc) error {
		if gaveUp(choice) {
			return errGaveUp
		}
		return nil
	})
}

// readServerInfo reads the response to GET /server_info: {"disaggregated_params": {"ctx_info_endpoint": …,
// "encoded_opaque_state": …}}. If the endpoint is a list, it uses the first.
func readServerInfo(body []byte) (json.RawMessage, error) {
	bad := func(what string) (json.RawMessage, error) {
		return nil, handoff.NoTransfer("what P's server says of itself %s", what)
	}
	d, err := jsonedit.Parse(body)
	if err != nil || !utf8.Valid(body) || !handoff.WellFormed(body) {
		return bad("is not one JSON object")
	}
	raw, ok := given(d, paramsMember)
	if !ok {
		return bad("has no disaggregated_params")
	}
	params, err := jsonedit.Parse(raw)
	if err != nil {
		return bad("has disaggregated_params that are not an object without duplicate members")
	}
	if state, ok := given(params, "encoded_opaque_state"); ok && jsonedit.Kind(state) != jsonedit.String {
		return bad("has an encoded_opaque_state that is not a string")
	}
	endpoint, ok := given(params, "ctx_info_endpoint")
	if !ok {
		return raw, nil
	}
	if jsonedit.Kind(endpoint) == jsonedit.Array {
		first := json.RawMessage(gjson.GetBytes(endpoint, "0").Raw)
		if len(first) == 0 {
			first = json.RawMessage("null")
		}
		if raw, err = jsonedit.SetIn(raw, "ctx_info_endpoint", first); err != nil {
			return bad("cannot be read")
		}
		endpoint = first
	}
	if k := jsonedit.Kind(endpoint); k != jsonedit.String && k != jsonedit.Null {
		return bad("has a ctx_info_endpoint that is not a string")
	}
	return raw, nil
}
