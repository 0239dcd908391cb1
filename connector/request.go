// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Request is a client's request, read once: its body is indexed, not decoded. It is immutable and refers to the body's
// bytes, which must not change while it is used.
type Request struct {
	API    API
	Model  string // "" if the request names none
	Stream bool

	doc   jsonedit.Doc
	strip []jsonedit.Edit // every leg starts with these: the client's own transfer members go
}

// transferMembers carry transfer instructions. They are never believed from a client: whoever sets them chooses whose memory
// an engine reads (or kills it, captures/README.md §2.1).
var transferMembers = []string{
	"kv_transfer_params", "ec_transfer_params", "disaggregated_params",
	"bootstrap_host", "bootstrap_port", "bootstrap_room",
}

// transferHolders are members in which vLLM reads the same instructions again.
var transferHolders = []string{"vllm_xargs", "sampling_params"}

// ids are members by which a client could choose its id at the engines. The one that they see is the header's: a second one wins on
// /v1/responses. SGLang's rid does more, also on an engine that serves alone: when a client leaves, all requests whose ids begin with its
// rid are aborted, and with "" all there are (managers/scheduler.py, abort_request).
var ids = [...]string{"request_id", "rid"}

// ParseRequest reads a request body. The error is a *[RequestError]: the body is not one JSON object, names a
// top-level member twice, or holds a member of the wrong type that must be read.
func ParseRequest(api API, body []byte) (*Request, error) {
	r := &Request{API: api}
	if err := r.doc.ParseInto(body); err != nil {
		return nil, bodyError(err)
	}
	if err := r.check(); err != nil {
		return nil, err
	}
	if err := r.stripTransfer(); err != nil {
		return nil, err
	}
	return r, nil
}

func bodyError(err error) error {
	if dup, ok := errors.AsType[*jsonedit.DuplicateError](err); ok {
		return &RequestError{Param: shown(dup.Name), Message: "the member stands twice in the body; send it once", Err: err}
	}
	if syn, ok := errors.AsType[*jsonedit.SyntaxError](err); ok {
		return &RequestError{Message: fmt.Sprintf("the body is not one JSON object: %s at byte %d", syn.Msg, syn.Offset), Err: err}
	}
	return &RequestError{Message: "the body is not one JSON object", Err: err}
}

// check reads the members whose type decides what happens to a request. A member that is null counts as absent.
func (r *Request) check() error {
	if raw, ok := r.Field("model"); ok {
		s, err := jsonedit.Unquote(raw)
		if err != nil {
			return &RequestError{Param: "model", Message: "must be a string of valid UTF-8", Err: err}
		}
		r.Model = s
	}
	if raw, ok := r.Field("stream"); ok {
		if jsonedit.Kind(raw) != jsonedit.Bool {
			return &RequestError{Param: "stream", Message: "must be true or false"}
		}
		r.Stream = raw[0] == 't'
	}
	if err := r.checkObject("stream_options"); err != nil {
		return err
	}
	for _, name := range []string{"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of"} {
		if raw, ok := r.Field(name); ok && !isInteger(raw) {
			return &RequestError{Param: name, Message: "must be an integer"}
		}
	}
	if s := r.API.info().sampling; s != "" {
		return r.checkSampling(s)
	}
	return nil
}

func (r *Request) checkObject(name string) error {
	if raw, ok := r.Field(name); ok && jsonedit.Kind(raw) != jsonedit.Object {
		return &RequestError{Param: name, Message: "must be an object"}
	}
	return nil
}

// checkSampling reads the limits of the APIs that keep them one level down.
func (r *Request) checkSampling(holder string) error {
	raw, ok := r.Field(holder)
	if !ok {
		return nil
	}
	if jsonedit.Kind(raw) != jsonedit.Object {
		return &RequestError{Param: holder, Message: "must be an object"}
	}
	if !utf8.Valid(raw) {
		return &RequestError{Param: holder, Message: "must be valid UTF-8"}
	}
	sub, err := jsonedit.Parse(raw)
	if err != nil {
		return nestedError(holder, err)
	}
	for _, name := range []string{"max_tokens", "min_tokens", "max_new_tokens", "min_new_tokens", "n", "best_of"} {
		if v, ok := field(sub, name); ok && !isInteger(v) {
			return &RequestError{Param: holder + "." + name, Message: "must be an integer"}
		}
	}
	return nil
}

// shown is a member's name as an error may show it: one that could be a parameter. Others are the client's own text.
func shown(name string) string {
	if name == "" || len(name) > 64 || strings.ContainsFunc(name, func(r rune) bool {
		return r != '_' && r != '-' && r != '.' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	}) {
		return "(a member)"
	}
	return name
}

func nestedError(holder string, err error) error {
	if inner, ok := errors.AsType[*RequestError](err); ok {
		return &RequestError{Param: holder + "." + inner.Param, Message: inner.Message, Err: inner.Err}
	}
	if dup, ok := errors.AsType[*jsonedit.DuplicateError](err); ok {
		return &RequestError{Param: holder + "." + shown(dup.Name), Message: "the member stands twice; send it once", Err: err}
	}
	return &RequestError{Param: holder, Message: "is not a well-formed object", Err: err}
}

// isInteger accepts what the engines' schema accepts as one: 16, and 16.0 too.
func isInteger(raw []byte) bool {
	if jsonedit.Kind(raw) != jsonedit.Number {
		return false
	}
	if _, ok := jsonedit.Int(raw); ok {
		return true
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	return err == nil && f == math.Trunc(f)
}

func (r *Request) stripTransfer() error {
	for _, name := range transferMembers {
		if _, ok := r.doc.Get(name); ok {
			r.strip = append(r.strip, jsonedit.Edit{Name: name, Delete: true})
		}
	}
	for _, name := range ids {
		if _, ok := r.doc.Get(name); ok {
			r.strip = append(r.strip, jsonedit.Edit{Name: name, Delete: true})
		}
	}
	for _, holder := range transferHolders {
		raw, ok := r.doc.Get(holder)
		if !ok || jsonedit.Kind(raw) != jsonedit.Object {
			continue
		}
		clean, changed, err := stripHolder(raw, true)
		if err != nil {
			return nestedError(holder, err)
		}
		if changed {
			r.strip = append(r.strip, jsonedit.Edit{Name: holder, Value: clean})
		}
	}
	return nil
}

// stripHolder removes transfer members from vllm_xargs or sampling_params and, withExtra, from the extra_args inside. No engine reads
// them any deeper; following extra_args further would let a body nested 10,000 deep cost as many passes over itself.
func stripHolder(raw []byte, withExtra bool) (out []byte, changed bool, err error) {
	d, err := jsonedit.Parse(raw)
	if err != nil {
		return nil, false, err
	}
	out = raw
	for _, name := range transferMembers {
		if _, ok := d.Get(name); ok {
			if out, err = jsonedit.DeleteIn(out, name); err != nil {
				return nil, false, err
			}
			changed = true
		}
	}
	if extra, ok := d.Get("extra_args"); ok && withExtra && jsonedit.Kind(extra) == jsonedit.Object {
		clean, inner, err := stripHolder(extra, false)
		if err != nil {
			return nil, false, nestedError("extra_args", err)
		}
		if inner {
			changed = true
			if out, err = jsonedit.SetIn(out, "extra_args", clean); err != nil {
				return nil, false, err
			}
		}
	}
	return out, changed, nil
}

// Field returns the raw value of a top-level member as the client sent it. A member that is null is absent.
func (r *Request) Field(name string) (json.RawMessage, bool) { return field(&r.doc, name) }

// Body returns the client's body, which must not be changed.
func (r *Request) Body() []byte { return r.doc.Bytes() }

// sampling returns a sampling member wherever the API keeps it.
func (r *Request) sampling(name string) (json.RawMessage, bool) {
	holder := r.API.info().sampling
	if holder == "" {
		return r.Field(name)
	}
	raw, ok := r.Field(holder)
	if !ok {
		return nil, false
	}
	d, err := jsonedit.Parse(raw)
	if err != nil {
		return nil, false
	}
	return field(d, name)
}

// Unsupported says why a request cannot be carried by two engines at all, or "": the name of the member that prevents
// it. singleUse tells that the handoff can be read only once, so that several answers to one prompt cannot share it.
//
//   - prompt, prompt_embeds: several prompts in one body; P answers with the handoff of the first only (captures nixl/15);
//   - prompt_logprobs, or echo with logprobs, or echo alone in a chat (which vLLM takes for prompt_logprobs): D computes the
//     prompt itself, and the handoff is left to expire (nixl/16); prompt_logprob_token_ids and skip_reading_prefix_cache of
//     /inference/v1/generate do the same (vllm/sampling_params.py);
//   - truncate_prompt_tokens below 0, or truncation other than disabled of /v1/responses: the prompt is cut to what the limit
//     of tokens leaves, which is another on each leg, and D answers wrongly to P's prompt (nixl/37c; vllm/renderers/params.py);
//   - use_beam_search: the transfer members are lost on both legs (protocols/vllm.md §1.10);
//   - n, best_of above 1 with a single-use handoff: the first reader frees the blocks (nixl/09);
//   - background, previous_response_id of /v1/responses: the answer's state lives in one engine.
func (r *Request) Unsupported(singleUse bool) (member string) {
	if member = r.severalPrompts(); member != "" {
		return member
	}
	if r.asks("prompt_logprobs") {
		return "prompt_logprobs"
	}
	if r.truthy("echo") && (r.API == APIChat || r.asks("logprobs")) {
		return "echo"
	}
	if r.API == APIGenerate && r.asks("prompt_logprob_token_ids") {
		return "prompt_logprob_token_ids"
	}
	if r.API == APIGenerate && r.truthy("skip_reading_prefix_cache") {
		return "skip_reading_prefix_cache"
	}
	if raw, ok := r.Field("truncate_prompt_tokens"); ok && bytes.HasPrefix(raw, []byte("-")) {
		return "truncate_prompt_tokens"
	}
	if r.truthy("use_beam_search") {
		return "use_beam_search"
	}
	if r.API == APIResponses {
		if member = r.unsupportedResponse(); member != "" {
			return member
		}
	}
	if singleUse {
		for _, name := range []string{"n", "best_of"} {
			if r.above1(name) {
				return name
			}
		}
	}
	return ""
}

func (r *Request) unsupportedResponse() string {
	if r.truthy("background") {
		return "background"
	}
	if _, ok := r.Field("previous_response_id"); ok {
		return "previous_response_id"
	}
	// Null is not absent here: vLLM compares with "disabled".
	if raw, ok := r.doc.Get("truncation"); ok && string(raw) != `"disabled"` {
		return "truncation"
	}
	return ""
}

func (r *Request) above1(name string) bool {
	raw, ok := r.sampling(name)
	if !ok {
		return false
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	return err == nil && f > 1
}

// asks reports whether a member is present and not false.
func (r *Request) asks(name string) bool {
	raw, ok := r.sampling(name)
	return ok && string(raw) != "false"
}

func (r *Request) truthy(name string) bool {
	raw, ok := r.sampling(name)
	return ok && !slices.Contains([]string{"false", "0", `""`}, string(raw))
}

// severalPrompts returns the member by which a body has more than one prompt, or "".
func (r *Request) severalPrompts() string {
	var names []string
	switch r.API {
	case APICompletions:
		names = []string{"prompt", "prompt_embeds"}
	case APISGLang:
		names = []string{"text", "input_ids"}
	}
	for _, name := range names {
		if raw, ok := r.Field(name); ok && jsonedit.Kind(raw) == jsonedit.Array && severalPrompts(raw) {
			return name
		}
	}
	if r.API != APICompletions {
		return ""
	}
	// vLLM takes prompt and prompt_embeds together for two prompts.
	_, text := r.Field("prompt")
	if embeds, ok := r.Field("prompt_embeds"); ok && text && !emptyArray(embeds) {
		return "prompt_embeds"
	}
	return ""
}
