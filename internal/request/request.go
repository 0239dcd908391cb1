// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Request is a client's request. Its body is indexed, not decoded.
type Request struct {
	API    API
	Model  string // "" if the request names none
	Stream bool
	Doc    jsonedit.Doc
	// the edits with which every leg starts: they remove the client's transfer members, and name the engines' model
	Strip  []jsonedit.Edit
	served json.RawMessage // the engines' name of the model; nil if it is the client's
}

// Parse reads a request body. The error is a *[Fault] if the body is not one JSON object, names a top-level member
// twice, or has a wrong type in a member that pdkit reads.
func (r *Request) Parse(api API, body []byte) error {
	r.API = api
	if err := r.Doc.ParseInto(body); err != nil {
		return bodyError(err)
	}
	if err := r.check(); err != nil {
		return err
	}
	for _, name := range ids {
		if _, ok := r.Doc.Get(name); ok {
			r.Strip = append(r.Strip, jsonedit.Edit{Name: name, Delete: true})
		}
	}
	strip, _, err := r.without(transferMembers, true)
	r.Strip = strip
	return err
}

// Fault is what is wrong with a request. Its text holds names and kinds, never values.
type Fault struct {
	Param   string // the member at fault, "" for the body as a whole
	Message string
	Err     error // cause, if any
}

// Error returns the message.
func (f *Fault) Error() string { return f.Message }

func bodyError(err error) error {
	if dup, ok := errors.AsType[*jsonedit.DuplicateError](err); ok {
		const twice = "the member stands twice in the body; send it once"
		return &Fault{Param: shown(dup.Name), Message: twice, Err: err}
	}
	if syn, ok := errors.AsType[*jsonedit.SyntaxError](err); ok {
		where := fmt.Sprintf("the body is not one JSON object: %s at byte %d", syn.Msg, syn.Offset)
		return &Fault{Message: where, Err: err}
	}
	return &Fault{Message: "the body is not one JSON object", Err: err}
}

// check reads the members whose types matter for how a request is served. Null counts as absent.
func (r *Request) check() error {
	if raw, ok := r.Field("model"); ok {
		s, err := jsonedit.Unquote(raw)
		if err != nil {
			return &Fault{Param: "model", Message: "must be a string of valid UTF-8", Err: err}
		}
		r.Model = s
	}
	if raw, ok := r.Field("stream"); ok {
		if jsonedit.Kind(raw) != jsonedit.Bool {
			return &Fault{Param: "stream", Message: "must be true or false"}
		}
		r.Stream = raw[0] == 't'
	}
	if err := r.checkObject("stream_options"); err != nil {
		return err
	}
	for _, name := range []string{
		"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of",
	} {
		if raw, ok := r.Field(name); ok && integral64(raw) != "" {
			return &Fault{Param: name, Message: notInteger}
		}
	}
	if s := r.API.Info().Sampling; s != "" {
		return r.checkSampling(s)
	}
	return nil
}

func (r *Request) checkObject(name string) error {
	if raw, ok := r.Field(name); ok && jsonedit.Kind(raw) != jsonedit.Object {
		return &Fault{Param: name, Message: "must be an object"}
	}
	return nil
}

// checkSampling reads the limits of the APIs that have them in a nested object.
func (r *Request) checkSampling(holder string) error {
	raw, ok := r.Field(holder)
	if !ok {
		return nil
	}
	if jsonedit.Kind(raw) != jsonedit.Object {
		return &Fault{Param: holder, Message: "must be an object"}
	}
	if !utf8.Valid(raw) {
		return &Fault{Param: holder, Message: "must be valid UTF-8"}
	}
	sub, err := jsonedit.Parse(raw)
	if err != nil {
		return nestedError(holder, err)
	}
	for _, name := range []string{"max_tokens", "min_tokens", "max_new_tokens", "min_new_tokens", "n", "best_of"} {
		if v, ok := Field(sub, name); ok && integral64(v) != "" {
			return &Fault{Param: holder + "." + name, Message: notInteger}
		}
	}
	return nil
}

// shown is a member's name for an error text, if it looks like a parameter's name. Other names are the client's own
// text.
func shown(name string) string {
	if name == "" || len(name) > 64 || strings.ContainsFunc(name, func(r rune) bool {
		return r != '_' && r != '-' && r != '.' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	}) {
		return "(a member)"
	}
	return name
}

func nestedError(holder string, err error) error {
	if inner, ok := errors.AsType[*Fault](err); ok {
		return &Fault{Param: holder + "." + inner.Param, Message: inner.Message, Err: inner.Err}
	}
	if dup, ok := errors.AsType[*jsonedit.DuplicateError](err); ok {
		member := holder + "." + shown(dup.Name)
		return &Fault{Param: member, Message: "the member stands twice; send it once", Err: err}
	}
	return &Fault{Param: holder, Message: "is not a well-formed object", Err: err}
}

// Serve has all legs name the model as engines do. raw is the name as JSON.
func (r *Request) Serve(model string, raw json.RawMessage) {
	r.Model, r.served = model, raw
	start := append(make([]jsonedit.Edit, 0, len(r.Strip)+1), r.Strip...)
	r.Strip = Edit(start, jsonedit.Edit{Name: "model", Value: raw})
}

// Field returns the raw value of a top-level member as the client sent it, but for a model's name after Serve. A member
// that is null is absent.
func (r *Request) Field(name string) (json.RawMessage, bool) {
	if r.served != nil && name == "model" {
		return r.served, true
	}
	return Field(&r.Doc, name)
}

// Field returns a member's raw value. A member that is null is absent.
func Field(d *jsonedit.Doc, name string) (json.RawMessage, bool) {
	raw, ok := d.Get(name)
	if !ok || jsonedit.Kind(raw) == jsonedit.Null {
		return nil, false
	}
	return raw, true
}

// sampling returns a sampling member from the place where the API has it. A member that is null is absent.
func (r *Request) sampling(name string) (json.RawMessage, bool) {
	return Field(r.SamplingDoc(), name)
}

// SamplingDoc returns the object that holds the sampling members, which may be empty.
func (r *Request) SamplingDoc() *jsonedit.Doc {
	holder := r.API.Info().Sampling
	if holder == "" {
		return &r.Doc
	}
	raw, _ := r.Field(holder)
	if d, err := jsonedit.Parse(raw); err == nil {
		return d
	}
	return &jsonedit.Doc{}
}

// StopsAt reports whether text is one of the request's own stop strings.
func (r *Request) StopsAt(text string) bool {
	raw, _ := r.sampling("stop")
	var one string
	if json.Unmarshal(raw, &one) == nil {
		return one == text
	}
	var all []string
	return json.Unmarshal(raw, &all) == nil && slices.Contains(all, text)
}

// Uncarried returns the first member of the list in package connector/check that a request has and that carried does
// not contain, or "".
func (r *Request) Uncarried(singleUse bool, carried []string) (member string) {
	found := func(name string, has bool) bool {
		if has && name != "" && !slices.Contains(carried, name) {
			member = name
		}
		return member != ""
	}
	switch {
	case found(r.severalPrompts(), true),
		found("prompt_logprobs", r.asks("prompt_logprobs")),
		found("echo", r.truthy("echo") && (r.API == Chat || r.asks("logprobs"))),
		found("truncate_prompt_tokens", r.truncates()),
		found("use_beam_search", r.truthy("use_beam_search")),
		r.API == Generate && (found("prompt_logprob_token_ids", r.asks("prompt_logprob_token_ids")) ||
			found("skip_reading_prefix_cache", r.truthy("skip_reading_prefix_cache"))),
		r.API == Responses && found(r.keptResponse(), true),
		singleUse && (found("n", r.above1("n")) || found("best_of", r.above1("best_of"))):
	}
	return member
}

// truncates reports whether the engine cuts the prompt to the length that the limit of tokens leaves.
func (r *Request) truncates() bool {
	raw, ok := r.Field("truncate_prompt_tokens")
	return ok && bytes.HasPrefix(raw, []byte("-"))
}

// keptResponse returns the member of a /v1/responses request that requires one engine to know a conversation's other
// responses, or that cuts the prompt by a limit of tokens.
func (r *Request) keptResponse() string {
	if r.truthy("background") {
		return "background"
	}
	for _, name := range [...]string{"previous_response_id", "conversation"} {
		if _, ok := r.Field(name); ok {
			return name
		}
	}
	// Null does not count as absent here: vLLM compares the value with "disabled".
	if raw, ok := r.Doc.Get("truncation"); ok && string(raw) != `"disabled"` {
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

// severalPrompts returns the member that gives a body more than one prompt, or "".
func (r *Request) severalPrompts() string {
	var names []string
	switch r.API {
	case Completions:
		names = []string{"prompt", "prompt_embeds"}
	case SGLang:
		names = []string{"text", "input_ids"}
	}
	for _, name := range names {
		if raw, ok := r.Field(name); ok && jsonedit.Kind(raw) == jsonedit.Array && severalPrompts(raw) {
			return name
		}
	}
	if r.API != Completions {
		return ""
	}
	// vLLM counts prompt and prompt_embeds together as two prompts.
	_, text := r.Field("prompt")
	if embeds, ok := r.Field("prompt_embeds"); ok && text && !emptyArray(embeds) {
		return "prompt_embeds"
	}
	return ""
}
