// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// ParamsMember is the request and response member with the parameters of vLLM's connectors.
const ParamsMember = "kv_transfer_params"

// Leg collects a connector's edits of one leg's request. The flow applies them all at once and copies nothing: members
// that are not edited keep every byte and their order. A Leg belongs to one goroutine.
type Leg struct {
	req    *ClientRequest
	edits  []jsonedit.Edit
	header []HeaderEdit
	path   string
	body   []byte // replaces the client's whole body
	errs   []error

	normalized bool // see NewPrefillLeg
}

// HeaderEdit is one header of a leg that the connector sets.
type HeaderEdit struct{ Name, Value string }

// NewLeg starts a leg as the client's request without transfer members.
func NewLeg(r *ClientRequest) *Leg {
	return &Leg{req: r, edits: append(make([]jsonedit.Edit, 0, 6), r.strip...)}
}

// NewPrefillLeg starts a prefill leg: the client's request without transfer members and, unless t.RawPrefill says
// otherwise, normalized. So it asks for one token in one whole response, and lacks members that only cost time
// (docs/protocols/vllm.md §4). With t.EndsByLength it also ends by length, whatever its first token is. Members that
// affect the prompt stay as they are, since both legs must render the same tokens.
func NewPrefillLeg(r *ClientRequest, t Traits) *Leg {
	l := NewLeg(r)
	if t.RawPrefill {
		return l
	}
	l.normalized = true
	l.LimitTokens(1)
	l.NoStream()
	l.singleChoice()
	if t.Ending.EndsByLength {
		l.endByLength()
	}
	return l
}

// Request returns the client's request.
func (l *Leg) Request() *ClientRequest { return l.req }

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

func (l *Leg) edit(e jsonedit.Edit) {
	for i := range l.edits {
		if l.edits[i].Name == e.Name {
			l.edits[i] = e
			return
		}
	}
	l.edits = append(l.edits, e)
}

// Current returns a top-level member with the leg's edits applied. It returns null as null.
func (l *Leg) Current(member string) (json.RawMessage, bool) {
	for i := range l.edits {
		if l.edits[i].Name == member {
			return l.edits[i].Value, !l.edits[i].Delete
		}
	}
	return l.req.doc.Get(member)
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
	i := l.req.API.info()
	if i.sampling == "" {
		if raw, ok := l.Current(name); ok && jsonedit.Kind(raw) != jsonedit.Null {
			l.Delete(name)
		}
		return
	}
	old, ok := l.Current(i.sampling)
	if _, there := l.req.sampling(name); !ok || !there {
		return
	}
	v, err := jsonedit.DeleteIn(old, name)
	if err != nil {
		l.fail(fmt.Errorf("%s: %w", i.sampling, err))
		return
	}
	l.Set(i.sampling, v)
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

// SetHeader sets a header of the leg and replaces the client's.
func (l *Leg) SetHeader(name, value string) {
	l.header = append(l.header, HeaderEdit{name, value})
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
func (l *Leg) SetPath(p string) { l.path = p }

// SetBody replaces the client's whole body, for an encode leg.
func (l *Leg) SetBody(raw json.RawMessage) { l.body = raw }

func (l *Leg) fail(err error) { l.errs = append(l.errs, err) }

var jsonOne, jsonFalse = json.RawMessage("1"), json.RawMessage("false")

// LimitTokens limits the output to n tokens in the members that the request's API uses. It drops min_tokens, since the
// client's minimum would be an error if it is above the limit.
func (l *Leg) LimitTokens(n int) {
	raw := jsonOne
	if n != 1 {
		raw = json.RawMessage(strconv.Itoa(n))
	}
	i := l.req.API.info()
	if i.limit == "" {
		l.fail(errors.New("the client API is unknown, so that its response cannot be limited"))
		return
	}
	l.setSampling(i.limit, raw)
	if _, ok := l.req.doc.Get(i.altLimit); ok && i.altLimit != "" {
		l.Set(i.altLimit, raw)
	}
	for k := range i.members {
		if m := &i.members[k]; m.loss == byLimit && m.name != i.limit && m.name != i.altLimit {
			l.lose(m.name)
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
	i := l.req.API.info()
	for k := range i.members {
		switch m := &i.members[k]; m.loss {
		case toOne:
			if _, ok := l.req.sampling(m.name); ok {
				l.setSampling(m.name, jsonOne)
			}
		case dropped:
			l.lose(m.name)
		}
	}
}

// setSampling sets a sampling member in the place where the API has it.
func (l *Leg) setSampling(name string, raw json.RawMessage) {
	if holder := l.req.API.info().sampling; holder != "" {
		l.SetAt([]string{holder, name}, raw)
		return
	}
	l.Set(name, raw)
}

// dropThinkingBudget removes thinking from a normalized /v1/messages leg if it sets a budget, since a budget must be
// less than max_tokens. vLLM makes an exception only for legs with do_remote_decode (0.32.0,
// vllm/entrypoints/anthropic/protocol.py). The prompt stays the same: a budget only limits the output.
func (l *Leg) dropThinkingBudget() {
	if l.req.API != APIMessages {
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
// P's response says how P ended: see [PrefillChecker].
func (l *Leg) endByLength() {
	i := l.req.API.info()
	for k := range i.members {
		if m := &i.members[k]; m.loss == byEnding {
			l.lose(m.name)
		}
	}
	if raw, ok := l.Current("ignore_eos"); l.req.API == APIResponses && (!ok || jsonedit.Kind(raw) != jsonedit.Null) {
		l.Set("ignore_eos", json.RawMessage("true")) // vLLM refuses null, as lose says
	}
	if raw, ok := l.req.samplingDoc().Get(i.minimum); i.minimum != "" && (!ok || jsonedit.Kind(raw) != jsonedit.Null) {
		l.setSampling(i.minimum, jsonOne)
	}
}

// Splice writes the leg's body to dst without copying the untouched members. Only the flow calls it.
func (l *Leg) Splice(dst *jsonedit.Segments) error {
	if err := errors.Join(l.errs...); err != nil {
		return err
	}
	if l.body != nil {
		var d jsonedit.Doc
		if err := d.ParseInto(l.body); err != nil {
			return err
		}
		d.Splice(nil, dst)
		return nil
	}
	if l.normalized {
		l.dropThinkingBudget()
	}
	l.req.doc.Splice(l.edits, dst)
	return nil
}

// Body returns the leg's body in one piece, for tests and for callers that send legs themselves.
func (l *Leg) Body() ([]byte, error) {
	var s jsonedit.Segments
	if err := l.Splice(&s); err != nil {
		return nil, err
	}
	return s.AppendTo(nil), nil
}

// Header returns the headers the connector has set, in order.
func (l *Leg) Header() []HeaderEdit { return slices.Clip(l.header) }

// Path returns the path that the connector has set, or that of the client's API.
func (l *Leg) Path() string {
	if l.path != "" {
		return l.path
	}
	return l.req.API.Path()
}
