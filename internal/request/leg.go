// SPDX-License-Identifier: Apache-2.0

package request

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// ParamsMember is the request and response member with the parameters of vLLM's connectors.
const ParamsMember = "kv_transfer_params"

// Leg collects the edits of one leg's request, see connector.Leg.
type Leg struct {
	Request *Request
	Edits   []jsonedit.Edit
	Headers []Header
	Path    string // "" is that of the client's API
	Body    []byte // replaces the client's whole body
	errs    []error

	normalized bool
}

// Header is one header of a leg that a connector sets.
type Header struct{ Name, Value string }

// Start begins the leg as the client's request without transfer members.
func (l *Leg) Start(r *Request) {
	l.Request, l.Edits = r, append(make([]jsonedit.Edit, 0, 6), r.Strip...)
}

// Normalize makes a leg that has no edits yet ask for one token in one whole response, without members that only cost
// time (docs/protocols/vllm.md §4). With ends it also ends by length, whatever its first token is. Members that affect
// the prompt stay as they are, since both legs must render the same tokens.
func (l *Leg) Normalize(ends bool) {
	l.normalized = true
	l.LimitTokens(1)
	l.NoStream()
	l.singleChoice()
	if ends {
		l.endByLength()
	}
}

// Set gives a top-level member a raw JSON value. The last Set or Delete of a member wins.
func (l *Leg) Set(member string, raw json.RawMessage) {
	l.edit(jsonedit.Edit{Name: member, Value: raw})
}

// Delete removes a top-level member, if it is there.
func (l *Leg) Delete(member string) {
	if _, there := l.Current(member); there {
		l.edit(jsonedit.Edit{Name: member, Delete: true})
	}
}

func (l *Leg) edit(e jsonedit.Edit) { l.Edits = Edit(l.Edits, e) }

// Current returns a top-level member with the leg's edits applied. It returns null as null.
func (l *Leg) Current(member string) (json.RawMessage, bool) {
	return Current(&l.Request.Doc, l.Edits, member)
}

// SetAt sets a nested member and creates the objects around it if they are missing. It is for small objects: each call
// copies the outermost one. If a value on the way is neither an object nor null, building the leg fails.
func (l *Leg) SetAt(path []string, raw json.RawMessage) {
	if len(path) == 0 {
		l.fail(errors.New("SetAt needs a path"))
		return
	}
	old, _ := l.Current(path[0])
	v, err := setIn(old, path[1:], raw)
	if err != nil {
		l.fail(fmt.Errorf("%s: %w", path[0], err))
		return
	}
	l.Set(path[0], v)
}

func setIn(old json.RawMessage, path []string, raw json.RawMessage) (json.RawMessage, error) {
	if len(path) == 0 {
		return raw, nil
	}
	if len(old) == 0 || jsonedit.Kind(old) == jsonedit.Null {
		old = json.RawMessage("{}")
	}
	d, err := jsonedit.Parse(old)
	if err != nil {
		return nil, fmt.Errorf("not a well-formed object: %w", err)
	}
	inner, _ := d.Get(path[0])
	v, err := setIn(inner, path[1:], raw)
	if err != nil {
		return nil, err
	}
	return jsonedit.SetIn(old, path[0], v)
}

// lose removes a member of the API's table that is not null. Null stays, since some engines refuse it: P then does so
// before it computes the prompt.
func (l *Leg) lose(name string) {
	i := l.Request.API.Info()
	if i.Sampling == "" {
		if raw, ok := l.Current(name); ok && jsonedit.Kind(raw) != jsonedit.Null {
			l.Delete(name)
		}
		return
	}
	old, ok := l.Current(i.Sampling)
	if _, there := l.Request.sampling(name); !ok || !there {
		return
	}
	v, err := jsonedit.DeleteIn(old, name)
	if err != nil {
		l.fail(fmt.Errorf("%s: %w", i.Sampling, err))
		return
	}
	l.Set(i.Sampling, v)
}

// Param sets one key of kv_transfer_params. If a key gets two different values, as from two children of a multi
// connector, building the leg fails.
func (l *Leg) Param(key string, raw json.RawMessage) {
	old, ok := l.Current(ParamsMember)
	if !ok {
		old = json.RawMessage("{}")
	}
	d, err := jsonedit.Parse(old)
	if err != nil {
		l.fail(fmt.Errorf("%s: %w", ParamsMember, err))
		return
	}
	if was, ok := d.Get(key); ok && string(was) != string(raw) {
		l.fail(fmt.Errorf("%s.%s is set twice, to different values", ParamsMember, key))
		return
	}
	v, err := jsonedit.SetIn(old, key, raw)
	if err != nil {
		l.fail(fmt.Errorf("%s: %w", ParamsMember, err))
		return
	}
	l.Set(ParamsMember, v)
}

// Params sets a whole kv_transfer_params object. If no key was set before, it keeps every byte; otherwise it is merged
// key by key, as by [Leg.Param].
func (l *Leg) Params(raw json.RawMessage) {
	if _, ok := l.Current(ParamsMember); !ok {
		l.Set(ParamsMember, raw)
		return
	}
	d, err := jsonedit.Parse(raw)
	if err != nil {
		l.fail(fmt.Errorf("%s: %w", ParamsMember, err))
		return
	}
	for i := range d.Len() {
		l.Param(d.Name(i), d.Value(i))
	}
}

func (l *Leg) fail(err error) { l.errs = append(l.errs, err) }

var jsonOne, jsonFalse = json.RawMessage("1"), json.RawMessage("false")

// LimitTokens limits the output to n tokens in the members that the request's API uses. It drops min_tokens, since the
// client's minimum would be an error if it is above the limit.
func (l *Leg) LimitTokens(n int) {
	raw := jsonOne
	if n != 1 {
		raw = json.RawMessage(strconv.Itoa(n))
	}
	i := l.Request.API.Info()
	if i.Limit == "" {
		l.fail(errors.New("the client API is unknown, so that its response cannot be limited"))
		return
	}
	l.setSampling(i.Limit, raw)
	if _, ok := l.Request.Doc.Get(i.AltLimit); ok && i.AltLimit != "" {
		l.Set(i.AltLimit, raw)
	}
	for k := range i.Members {
		if m := &i.Members[k]; m.Loss == ByLimit && m.Name != i.Limit && m.Name != i.AltLimit {
			l.lose(m.Name)
		}
	}
}

// NoStream asks for one whole response. Streams never carry kv_transfer_params (docs/protocols/nixl.md, recording 04),
// and engines refuse stream_options without a stream.
func (l *Leg) NoStream() {
	if raw, ok := l.Current("stream"); !ok || jsonedit.Kind(raw) != jsonedit.Null { // SGLang refuses null, as lose says
		l.Set("stream", jsonFalse)
	}
	l.Delete("stream_options")
}

// singleChoice asks for one choice without log probabilities and without echo: D serves what else the client wants.
func (l *Leg) singleChoice() {
	i := l.Request.API.Info()
	for k := range i.Members {
		switch m := &i.Members[k]; m.Loss {
		case ToOne:
			if _, ok := l.Request.sampling(m.Name); ok {
				l.setSampling(m.Name, jsonOne)
			}
		case Dropped:
			l.lose(m.Name)
		}
	}
}

// setSampling sets a sampling member in the place where the API has it.
func (l *Leg) setSampling(name string, raw json.RawMessage) {
	if holder := l.Request.API.Info().Sampling; holder != "" {
		l.SetAt([]string{holder, name}, raw)
		return
	}
	l.Set(name, raw)
}

// dropThinkingBudget removes thinking from a normalized /v1/messages leg if it sets a budget, since a budget must be
// less than max_tokens. vLLM makes an exception only for legs with do_remote_decode (0.32.0,
// vllm/entrypoints/anthropic/protocol.py). The prompt stays the same: a budget only limits the output.
func (l *Leg) dropThinkingBudget() {
	if l.Request.API != Messages {
		return
	}
	raw, _ := l.Current(ParamsMember)
	if params, err := jsonedit.Parse(raw); err == nil {
		if remote, _ := params.Get("do_remote_decode"); string(remote) == "true" {
			return
		}
	}
	if raw, _ = l.Current("thinking"); jsonedit.Kind(raw) != jsonedit.Object {
		return
	}
	if d, err := jsonedit.Parse(raw); err == nil {
		if _, ok := d.Get("budget_tokens"); ok {
			l.Delete("thinking")
		}
	}
}

// endByLength makes a normalized prefill leg end with the reason "length", whatever its first token is: it drops stop
// strings and stop tokens, and min_tokens 1 masks the end of sequence. Some protocols transfer nothing if P ends for
// another reason, and D then waits for minutes (docs/protocols/vllm.md §4, docs/protocols/mooncake.md §3).
// /v1/responses has no min_tokens, but ignore_eos. /v1/messages has neither (vLLM 0.32.0's OpenAPI document), so only
// P's response says how P ended: see connector.PrefillChecker.
func (l *Leg) endByLength() {
	i := l.Request.API.Info()
	for k := range i.Members {
		if m := &i.Members[k]; m.Loss == ByEnding {
			l.lose(m.Name)
		}
	}
	if raw, ok := l.Current("ignore_eos"); l.Request.API == Responses && (!ok || jsonedit.Kind(raw) != jsonedit.Null) {
		l.Set("ignore_eos", json.RawMessage("true")) // vLLM refuses null, as lose says
	}
	raw, ok := l.Request.SamplingDoc().Get(i.Minimum)
	if i.Minimum != "" && (!ok || jsonedit.Kind(raw) != jsonedit.Null) {
		l.setSampling(i.Minimum, jsonOne)
	}
}

// Splice writes the leg's body to dst without copying the untouched members.
func (l *Leg) Splice(dst *jsonedit.Segments) error {
	if err := errors.Join(l.errs...); err != nil {
		return err
	}
	if l.Body != nil {
		var d jsonedit.Doc
		if err := d.ParseInto(l.Body); err != nil {
			return err
		}
		d.Splice(nil, dst)
		return nil
	}
	if l.normalized {
		l.dropThinkingBudget()
	}
	l.Request.Doc.Splice(l.Edits, dst)
	return nil
}
