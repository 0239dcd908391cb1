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
	"github.com/pdkit/pdkit/internal/jsonedit"
)

func checkLegs(t *trial) error {
	return t.each(all, func(_ sample, p *played) error {
		if p.final {
			return errors.New("the harness's Answer is one that Final takes for the client's")
		}
		for name, leg := range p.legs() {
			if err := wellFormed(leg); err != nil {
				return fmt.Errorf("the %s leg: %w", name, err)
			}
		}
		return nil
	})
}

// hopHeaders are those that say how a message is framed: the flow's and the transport's, never a connector's.
var hopHeaders = []string{"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}

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
		// vLLM wants max_tokens above the budget, but of a leg with do_remote_decode (0.32.0, vllm/entrypoints/anthropic/protocol.py).
		if smp.api == connector.APIMessages && gjson.GetBytes(body, "thinking.budget_tokens").Exists() && !gjson.GetBytes(body, "kv_transfer_params.do_remote_decode").Bool() {
			return errors.New("the prefill leg's thinking.budget_tokens is above its max_tokens, which engines refuse: see Leg.DropThinkingBudget")
		}
		return nil
	}))
}

// excused takes a rule's end where the harness says that the protocol does not keep it. An exception that nothing needs would hide what
// goes wrong later, so it is a fault of the harness.
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
	answers := t.each(all, func(smp sample, p *played) error {
		s := shapes[smp.api]
		for _, name := range s.answers {
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
		t.excused(t.Except.KeepsStream, "KeepsStream", stream), t.excused(t.Except.KeepsAnswers, "KeepsAnswers", answers),
		t.excused(t.Except.KeepsLogprobs, "KeepsLogprobs", logprobs),
	} {
		if _, excused := errors.AsType[notApplicable](err); !excused && broken == nil {
			broken = err
		}
	}
	return broken
}

// own are the members that the connector may set on any leg.
func (t *trial) own() []string {
	return append(append(slices.Clone(transferMembers), "request_id"), t.Own...)
}

// normal are what a prefill leg may have otherwise, and in sampling whether they are there or at the top.
func (s shape) normal() []string {
	return append(append([]string{s.limit, s.alt, s.minimum, "stop", "stop_token_ids", "stop_sequences", "ignore_eos"}, s.answers...), s.wasted...)
}

func checkPrefillKeeps(t *trial) error {
	return t.each(all, func(smp sample, p *played) error {
		s := shapes[smp.api]
		free := append(t.own(), "stream", "stream_options", "thinking")
		if s.holder == "" {
			free = append(free, s.normal()...)
			return same(p.s.Request, p.prefill.body, free)
		}
		if err := same(p.s.Request, p.prefill.body, append(free, s.holder)); err != nil {
			return err
		}
		return sameInner(smp.body, p.prefill.body, s.holder, s.normal())
	})
}

func checkDecodeKeeps(t *trial) error {
	return t.each(all, func(smp sample, p *played) error {
		for _, leg := range []*sent{&p.decode, p.first} {
			if leg == nil || leg.body == nil {
				continue
			}
			if err := same(p.s.Request, leg.body, t.own()); err != nil {
				return err
			}
			for _, name := range t.Own { // what the client has there besides stays
				if err := sameInner(smp.body, leg.body, name, transferMembers); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// same checks that a leg is the client's request to the byte, but for the free members: it makes the leg again from the request and the
// leg's own values of those.
func same(r *connector.Request, body []byte, free []string) error {
	d, err := jsonedit.Parse(body)
	if err != nil {
		return fmt.Errorf("the leg is not one JSON object: %w", err)
	}
	again := connector.NewLeg(r)
	for i := range d.Len() {
		if slices.Contains(free, d.Name(i)) {
			again.Set(d.Name(i), d.Value(i))
		}
	}
	for _, name := range free {
		if _, ok := d.Get(name); !ok {
			again.Delete(name)
		}
	}
	want, err := again.Body()
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
			return fmt.Errorf("the client's member %s is not the same to the byte: %s became %s", w.Name(i), w.Value(i), v)
		}
	}
	for i := range got.Len() {
		if _, ok := w.Get(got.Name(i)); !ok {
			return fmt.Errorf("the member %s was added, which Harness.Own does not name", got.Name(i))
		}
	}
	return errors.New("the members are the client's, but their order, names or white space are not")
}

// sameInner checks that the members of an object of the client's are still there to the byte, but for the free ones.
func sameInner(client string, body []byte, holder string, free []string) error {
	was, now := gjson.Get(client, holder), gjson.GetBytes(body, holder)
	if !was.IsObject() {
		return nil
	}
	var fault error
	was.ForEach(func(key, value gjson.Result) bool {
		if slices.Contains(free, key.Str) {
			return true
		}
		d, err := jsonedit.Parse([]byte(now.Raw))
		if err != nil {
			fault = fmt.Errorf("%s is no object any more", holder)
			return false
		}
		if v, _ := d.Get(key.Str); string(v) != value.Raw {
			fault = fmt.Errorf("%s.%s was %s and is %s", holder, key.Str, value.Raw, v)
		}
		return fault == nil
	})
	return fault
}

func checkTransferGone(t *trial) error {
	one := func(api connector.API) []sample { return []sample{forged(api)} }
	return t.each(one, func(_ sample, p *played) error {
		for name, leg := range p.legs() {
			if where := leg.find(clientCanary); where != "" {
				return fmt.Errorf("the %s leg has the client's own transfer member in its %s", name, where)
			}
		}
		return nil
	})
}

func checkRequestID(t *trial) error {
	return t.each(all, func(_ sample, p *played) error {
		for name, leg := range p.legs() {
			if where := leg.find(requestCanary); where != "" {
				return fmt.Errorf("the %s leg has the client's X-Request-Id in its %s: two requests may share it, and so would read each other's KV", name, where)
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
