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

// transferMembers carry the transfer instructions of the protocols that pdkit knows. They are never believed from a client, whichever
// connector serves it: whoever sets them chooses whose memory an engine reads (or kills it, captures/README.md §2.1). What else a connector
// uses, it declares: [Traits], Members.
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
	for _, name := range ids {
		if _, ok := r.doc.Get(name); ok {
			r.strip = append(r.strip, jsonedit.Edit{Name: name, Delete: true})
		}
	}
	return r.without(transferMembers, true)
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

// Without returns the request without a client's own transfer members, each a path as in [Traits]: no leg of it carries them. It is r itself,
// and nothing is allocated, where the body has none. Top-level members go wherever vLLM reads them again, too: inside of vllm_xargs and
// sampling_params, and of extra_args in these. Those of the protocols that pdkit knows have gone before. The error is a *[RequestError]:
// an object on the way names a member twice, so that engines might read another one than was removed.
func (r *Request) Without(members []string) (*Request, error) { return r.without(members, false) }

// without looks into the objects in which vLLM reads members again whatever they hold, if strict: a malformed one is refused.
func (r *Request) without(members []string, strict bool) (*Request, error) {
	out := r
	change := func(e jsonedit.Edit) {
		if out == r {
			clone := *r
			clone.strip = slices.Clone(r.strip)
			out = &clone
		}
		if i := slices.IndexFunc(out.strip, func(was jsonedit.Edit) bool { return was.Name == e.Name }); i >= 0 {
			out.strip[i] = e
			return
		}
		out.strip = append(out.strip, e)
	}
	for _, path := range members {
		name, below, nested := strings.Cut(path, ".")
		raw, ok := out.kept(name)
		if !ok {
			continue
		}
		if !nested {
			change(jsonedit.Edit{Name: name, Delete: true})
			continue
		}
		clean, err := stripPath(raw, below)
		if err != nil {
			return nil, nestedError(name, err)
		}
		if clean != nil {
			change(jsonedit.Edit{Name: name, Value: clean})
		}
	}
	for _, holder := range transferHolders {
		raw, ok := out.kept(holder)
		if !ok {
			continue
		}
		clean, err := stripHolder(raw, members, strict, true)
		if err != nil {
			return nil, nestedError(holder, err)
		}
		if clean != nil {
			change(jsonedit.Edit{Name: holder, Value: clean})
		}
	}
	return out, nil
}

// kept returns a top-level member as legs start with it.
func (r *Request) kept(name string) ([]byte, bool) {
	for i := range r.strip {
		if r.strip[i].Name == name {
			return r.strip[i].Value, !r.strip[i].Delete
		}
	}
	return r.doc.Get(name)
}

// stripPath removes a nested member from an object. It returns nil if there is nothing to remove.
func stripPath(raw []byte, path string) ([]byte, error) {
	name, below, nested := strings.Cut(path, ".")
	if jsonedit.Kind(raw) != jsonedit.Object || !mayName(raw, name) {
		return nil, nil
	}
	d, err := jsonedit.Parse(raw)
	if err != nil {
		return nil, err
	}
	inner, ok := d.Get(name)
	switch {
	case !ok:
		return nil, nil
	case !nested:
		return jsonedit.DeleteIn(raw, name)
	}
	clean, err := stripPath(inner, below)
	if err != nil {
		return nil, nestedError(name, err)
	}
	if clean == nil {
		return nil, nil
	}
	return jsonedit.SetIn(raw, name, clean)
}

// stripHolder removes top-level transfer members from vllm_xargs or sampling_params and, withExtra, from the extra_args inside. It returns
// nil if there is nothing to remove. No engine reads them any deeper; following extra_args further would let a body nested 10,000 deep cost
// as many passes over itself.
func stripHolder(raw []byte, members []string, strict, withExtra bool) (out []byte, err error) {
	inside := func(m string) bool { return !strings.Contains(m, ".") && mayName(raw, m) }
	if jsonedit.Kind(raw) != jsonedit.Object || !strict && !slices.ContainsFunc(members, inside) {
		return nil, nil
	}
	d, err := jsonedit.Parse(raw)
	if err != nil {
		return nil, err
	}
	rest := raw
	for _, name := range members {
		if _, ok := d.Get(name); ok && !strings.Contains(name, ".") {
			if rest, err = jsonedit.DeleteIn(rest, name); err != nil {
				return nil, err
			}
			out = rest
		}
	}
	if extra, ok := d.Get("extra_args"); ok && withExtra {
		clean, err := stripHolder(extra, members, strict, false)
		if err != nil {
			return nil, nestedError("extra_args", err)
		}
		if clean != nil {
			return jsonedit.SetIn(rest, "extra_args", clean)
		}
	}
	return out, nil
}

// mayName reports whether a value can have a member of that name somewhere: its text stands there, or one is written with escapes.
func mayName(raw []byte, name string) bool {
	return bytes.Contains(raw, []byte(name)) || bytes.IndexByte(raw, '\\') >= 0
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

// uncarried returns the first member of [Traits.CheckRequest]'s list that a request has and that is not among carried, or "".
func (r *Request) uncarried(singleUse bool, carried []string) (member string) {
	found := func(name string, has bool) bool {
		if has && name != "" && !slices.Contains(carried, name) {
			member = name
		}
		return member != ""
	}
	switch {
	case found(r.severalPrompts(), true),
		found("prompt_logprobs", r.asks("prompt_logprobs")),
		found("echo", r.truthy("echo") && (r.API == APIChat || r.asks("logprobs"))),
		found("truncate_prompt_tokens", r.truncates()),
		found("use_beam_search", r.truthy("use_beam_search")),
		r.API == APIGenerate && (found("prompt_logprob_token_ids", r.asks("prompt_logprob_token_ids")) ||
			found("skip_reading_prefix_cache", r.truthy("skip_reading_prefix_cache"))),
		r.API == APIResponses && found(r.keptResponse(), true),
		singleUse && (found("n", r.above1("n")) || found("best_of", r.above1("best_of"))):
	}
	return member
}

// truncates reports whether the prompt is cut to what the limit of tokens leaves.
func (r *Request) truncates() bool {
	raw, ok := r.Field("truncate_prompt_tokens")
	return ok && bytes.HasPrefix(raw, []byte("-"))
}

// keptResponse returns the member of a /v1/responses request for which one engine must know the others of a conversation, or cut the
// prompt by a limit of its own.
func (r *Request) keptResponse() string {
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
