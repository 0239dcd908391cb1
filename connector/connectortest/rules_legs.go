// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

func checkLegs(t *trial) error {
	list := func(api connector.API) []sample { return append(all(api), t.carried(api)...) }
	for _, t.order = range append([]connector.Order{t.traits.Order}, t.traits.OtherOrders...) {
		err := t.each(list, func(_ sample, p *played) error {
			if p.final {
				return errors.New("the harness's Response is one that Final takes for the client's")
			}
			for name, leg := range p.legs() {
				if err := wellFormed(leg); err != nil {
					return fmt.Errorf("the %s leg: %w", name, err)
				}
			}
			return nil
		})
		if err != nil && t.order != t.traits.Order {
			err = fmt.Errorf("in the order %s, which is one of Traits' OtherOrders: %w", t.order, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// hopHeaders are those that say how a message is framed: the flow's and the transport's, never a connector's.
var hopHeaders = []string{"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding",
	"upgrade"}

func wellFormed(leg sent) error {
	if !json.Valid(leg.body) {
		return errors.New("its body is not JSON")
	}
	if _, err := jsonedit.Parse(leg.body); err != nil {
		return fmt.Errorf("its body is not one object with each member once: %w", err)
	}
	if !strings.HasPrefix(leg.path, "/") || strings.ContainsAny(leg.path, " ?#\r\n") {
		return errors.New("its path does not begin with / or is more than a path")
	}
	for _, h := range leg.header {
		if h.Name == "" || strings.ContainsFunc(h.Name, func(r rune) bool {
			return r != '-' && r != '_' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
		}) {
			return fmt.Errorf("%q is not a header's name", h.Name)
		}
		if slices.Contains(hopHeaders, strings.ToLower(h.Name)) {
			return fmt.Errorf("the header %s is not a connector's to set", h.Name)
		}
		if strings.ContainsFunc(h.Value, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return fmt.Errorf("the header %s has a control character", h.Name)
		}
	}
	return nil
}

// sampled reads a member of a leg where the API keeps sampling members.
func sampled(s shape, body []byte, name string) gjson.Result {
	path := name
	if s.holder != "" {
		path = s.holder + "." + name
	}
	return gjson.GetBytes(body, path)
}

func checkLimit(t *trial) error {
	return t.excused(t.Except.KeepsLimit, "KeepsLimit", t.each(all, func(smp sample, p *played) error {
		s, body := shapes[smp.api], p.prefill.body
		used := []string{s.limit}
		if s.alt != "" && sampled(s, []byte(smp.body), s.alt).Exists() {
			used = append(used, s.alt) // the one that counts
		}
		for _, name := range used {
			if v := sampled(s, body, name); v.Raw != "1" {
				return fmt.Errorf("%s of the prefill leg is %s, want 1", name, orAbsent(v))
			}
		}
		if v := sampled(s, body, s.minimum); v.Exists() && v.Type != gjson.Null && v.Num > 1 {
			return fmt.Errorf("%s of the prefill leg is %s, above its limit", s.minimum, v.Raw)
		}
		// vLLM wants max_tokens above the budget, but of a leg with do_remote_decode (0.32.0,
		// vllm/entrypoints/anthropic/protocol.py).
		if smp.api == connector.APIMessages && gjson.GetBytes(body, "thinking.budget_tokens").Exists() &&
			!gjson.GetBytes(body, "kv_transfer_params.do_remote_decode").Bool() {
			return errors.New("the prefill leg's thinking.budget_tokens is above its max_tokens: see " +
				"contract.NewPrefillLeg")
		}
		return nil
	}))
}

// excused takes a rule's end where the harness says that the protocol does not keep it. An exception that nothing needs
// would hide what goes wrong later, so it is a fault of the harness.
func (t *trial) excused(said bool, exception string, broken error) error {
	switch {
	case !said:
		return broken
	case broken == nil:
		return fmt.Errorf("the harness: Except.%s is set, but the connector keeps the rule", exception)
	case panicked(broken):
		return broken
	}
	return notApplicable("Except." + exception + " is set: " + broken.Error())
}

func orAbsent(v gjson.Result) string {
	if !v.Exists() {
		return "absent"
	}
	return v.Raw
}

func checkWhole(t *trial) error {
	stream := t.each(all, func(_ sample, p *played) error {
		if gjson.GetBytes(p.prefill.body, "stream").Bool() {
			return errors.New("the prefill leg asks for a stream")
		}
		if gjson.GetBytes(p.prefill.body, "stream_options").Exists() {
			return errors.New("the prefill leg has stream_options without a stream")
		}
		return nil
	})
	choices := t.each(all, func(smp sample, p *played) error {
		s := shapes[smp.api]
		for _, name := range s.choices {
			if v := sampled(s, p.prefill.body, name); v.Num > 1 {
				return fmt.Errorf("%s of the prefill leg is %s", name, v.Raw)
			}
		}
		return nil
	})
	logprobs := t.each(all, func(smp sample, p *played) error {
		s := shapes[smp.api]
		for _, name := range s.wasted {
			if v := sampled(s, p.prefill.body, name); v.Exists() && v.Type != gjson.Null && v.Raw != "false" {
				return fmt.Errorf("the prefill leg has %s", name)
			}
		}
		return nil
	})
	var broken error
	for _, err := range []error{
		t.excused(t.Except.KeepsStream, "KeepsStream", stream),
		t.excused(t.Except.KeepsChoices, "KeepsChoices", choices),
		t.excused(t.Except.KeepsLogprobs, "KeepsLogprobs", logprobs),
	} {
		if _, excused := errors.AsType[notApplicable](err); !excused && broken == nil {
			broken = err
		}
	}
	return broken
}

// own are the members that the connector may set on any leg, as paths: what it declares, and the API members that the
// harness excuses.
func (t *trial) own() []string {
	list := append(slices.Clone(t.traits.Members), t.Except.Rewrites...)
	if t.traits.OwnRequestID {
		list = append(list, "request_id")
	}
	return list
}

// stops are the members that end a response early.
var stops = []string{"stop", "stop_token_ids", "stop_sequences"}

// normal are the API members that any prefill leg may have otherwise than the client.
func (t *trial) normal(s shape) []string {
	list := append(append([]string{s.limit, s.alt, s.minimum}, s.choices...), s.wasted...)
	if t.traits.Ending.EndsByLength {
		list = append(append(list, stops...), "ignore_eos")
	}
	list = slices.DeleteFunc(list, func(name string) bool { return name == "" })
	for i := range list {
		if s.holder != "" {
			list[i] = s.holder + "." + list[i]
		}
	}
	return append(list, "stream", "stream_options", "thinking")
}

func checkPrefillKeeps(t *trial) error {
	return t.each(all, func(smp sample, p *played) error {
		return same(p.s.Request, p.prefill.body, append(t.own(), t.normal(shapes[smp.api])...))
	})
}

func checkDecodeKeeps(t *trial) error {
	if err := t.rewrites(); err != nil {
		return err
	}
	return t.each(all, func(_ sample, p *played) error {
		for _, leg := range []*sent{&p.decode, p.first} {
			if leg == nil || leg.body == nil {
				continue
			}
			if err := same(p.s.Request, leg.body, t.own()); err != nil {
				return err
			}
		}
		return nil
	})
}

// rewrites checks that Except.Rewrites holds API members only, each of which some leg has otherwise than the client.
func (t *trial) rewrites() error {
	var known []string
	for _, s := range shapes {
		known = append(append(known, s.limit, s.alt, s.minimum), apiMembers...)
	}
	for _, name := range t.Except.Rewrites {
		if !slices.Contains(known, name) {
			return fmt.Errorf("the harness: Except.Rewrites has %s, which is no client API's member: see "+
				"Traits' Members", name)
		}
		without := slices.DeleteFunc(t.own(), func(m string) bool { return m == name })
		err := t.each(all, func(smp sample, p *played) error {
			return errors.Join(same(p.s.Request, p.decode.body, without),
				same(p.s.Request, p.prefill.body, append(t.normal(shapes[smp.api]), without...)))
		})
		if err == nil {
			return fmt.Errorf("the harness: Except.Rewrites has %s, but each leg has the client's", name)
		}
	}
	return nil
}

// apiMembers are members of the client APIs that have a meaning of their own on a leg, besides those in shapes.
var apiMembers = []string{"prompt", "prompt_token_ids", "return_token_ids", "truncate_prompt_tokens"}

// same checks that a leg is the client's request to the byte, but for the members at the free paths: it makes the leg
// again from the request and the leg's own values of those.
func same(r *connector.ClientRequest, body []byte, free []string) error {
	d, err := jsonedit.Parse(body)
	if err != nil {
		return fmt.Errorf("the leg is not one JSON object: %w", err)
	}
	again := contract.NewLeg(r)
	tops := map[string]bool{}
	for _, path := range free {
		name, _, nested := strings.Cut(path, ".")
		if tops[name] = true; nested && !slices.Contains(free, name) {
			was, _ := contract.NewLeg(r).Current(name)
			now, _ := d.Get(name)
			if err := sameInner(was, now, name, free); err != nil {
				return err
			}
		}
		if _, there := d.Get(name); !there {
			again.Delete(name)
		}
	}
	for i := range d.Len() {
		if tops[d.Name(i)] {
			again.Set(d.Name(i), d.Value(i))
		}
	}
	want, err := contract.Body(again)
	if err != nil {
		return err
	}
	if bytes.Equal(want, body) {
		return nil
	}
	return differs(want, d)
}

// differs says in what two bodies differ, by names.
func differs(want []byte, got *jsonedit.Doc) error {
	w, err := jsonedit.Parse(want)
	if err != nil {
		return err
	}
	for i := range w.Len() {
		v, ok := got.Get(w.Name(i))
		switch {
		case !ok:
			return fmt.Errorf("the client's member %s is gone", w.Name(i))
		case !bytes.Equal(v, w.Value(i)):
			return fmt.Errorf("the client's member %s is not the same to the byte: %s became %s", w.Name(i), w.Value(i),
				v)
		}
	}
	for i := range got.Len() {
		if _, ok := w.Get(got.Name(i)); !ok {
			return undeclared(got.Name(i))
		}
	}
	return errors.New("the members are the client's, but their order, names or white space are not")
}

func undeclared(path string) error {
	return fmt.Errorf("the member %s was added, which Traits' Members do not declare: a client's own reaches engines",
		path)
}

// sameInner checks that the members of an object are the client's to the byte, but for the free ones.
func sameInner(was, now json.RawMessage, at string, free []string) error {
	before, after := mustParse(was), mustParse(now)
	if len(now) == 0 || jsonedit.Kind(now) != jsonedit.Object {
		if len(was) > 0 && !bytes.Equal(was, now) {
			return fmt.Errorf("%s is no object any more", at)
		}
		return nil
	}
	isFree := func(path string) bool { return slices.Contains(free, path) }
	for i := range before.Len() {
		if _, there := after.Get(before.Name(i)); !there && !isFree(at+"."+before.Name(i)) {
			return fmt.Errorf("the client's member %s.%s is gone", at, before.Name(i))
		}
	}
	for i := range after.Len() {
		path := at + "." + after.Name(i)
		old, there := before.Get(after.Name(i))
		switch {
		case isFree(path), there && bytes.Equal(old, after.Value(i)):
		case slices.ContainsFunc(free, func(f string) bool { return strings.HasPrefix(f, path+".") }):
			if err := sameInner(old, after.Value(i), path, free); err != nil {
				return err
			}
		case !there:
			return undeclared(path)
		default:
			return fmt.Errorf("the client's member %s was %s and is %s", path, old, after.Value(i))
		}
	}
	return nil
}

func checkTransferGone(t *trial) error {
	one := func(api connector.API) []sample { return forged(api, t.traits.Members) }
	return t.each(one, func(_ sample, p *played) error {
		for name, leg := range p.legs() {
			if where := leg.find(plantedClient); where != "" {
				return fmt.Errorf("the %s leg has the client's own transfer member in its %s", name, where)
			}
		}
		return nil
	})
}

func checkRequestID(t *trial) error {
	return t.each(all, func(_ sample, p *played) error {
		for name, leg := range p.legs() {
			if where := leg.find(plantedRequest); where != "" {
				return fmt.Errorf("the %s leg has the client's X-Request-Id in its %s: two requests that share it"+
					" would read each other's KV", name, where)
			}
		}
		return nil
	})
}

// find says where a leg holds a text, or "".
func (l sent) find(text string) string {
	if bytes.Contains(l.body, []byte(text)) {
		return "body"
	}
	for _, h := range l.header {
		if strings.Contains(h.Value, text) {
			return "header " + h.Name
		}
	}
	if strings.Contains(l.path, text) {
		return "path"
	}
	return ""
}
