// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
)

// carriable are the members that Carries can have: those for which [check.Rules.Declared] refuses a request
// otherwise.
var carriable = []string{
	"prompt", "prompt_embeds", "text", "input_ids", "prompt_logprobs", "echo", "truncate_prompt_tokens",
	"use_beam_search",
	"prompt_logprob_token_ids", "skip_reading_prefix_cache", "background", "previous_response_id", "conversation",
	"truncation",
}

// checkTraits looks at the declaration alone.
func checkTraits(t *trial) error {
	d := t.traits
	again, err := t.New(slices.Clone(t.Config))
	if err != nil {
		return fmt.Errorf("a second New: %w", err)
	}
	for _, c := range []connector.KVConnector{t.c, t.c, again} {
		now := c.Traits()
		now.PairRules = d.PairRules // functions; another rule asks them
		if !reflect.DeepEqual(now, d) {
			return fmt.Errorf("its Traits are not constant: %s", unlikeTraits(d, now))
		}
	}
	for i, o := range d.OtherOrders {
		if o > connector.DecodeThenPrefill || o == d.Order || slices.Contains(d.OtherOrders[:i], o) {
			return fmt.Errorf("its OtherOrders have %s, which is unknown or there already", o)
		}
	}
	for i, a := range d.APIs {
		if a.Path() == "" || slices.Contains(d.APIs[:i], a) {
			return fmt.Errorf("its APIs have %s, which is unknown or there already", a)
		}
	}
	for _, m := range d.Carries {
		if !slices.Contains(carriable, m) {
			return fmt.Errorf("its Carries have %s, for which no request is refused; n and best_of go by MultiUse", m)
		}
	}
	for _, a := range d.Attributes {
		if a.Name == "" || a.Role == 0 || a.Remedy == "" {
			return fmt.Errorf("its attribute %q has no Name, Role or Remedy", a.Name)
		}
	}
	switch {
	case d.Handoff.Lease < 0 || d.Handoff.TransferTimeout < 0:
		return errors.New("its Lease or its TransferTimeout is negative")
	case d.Handoff.Member != "" && d.Handoff.Header != "":
		return errors.New("its Handoff is both a member and a header")
	case d.Handoff.ContentStore && (d.Handoff.Named() || d.OwnRequestID || d.Serving.PairOnly):
		return errors.New("it is a ContentStore, where the prompt alone tells, and yet has a Handoff, OwnRequestID " +
			"or PairOnly")
	}
	return checkMembers(d.Members)
}

func unlikeTraits(a, b connector.Traits) string {
	v, w := reflect.ValueOf(a), reflect.ValueOf(b)
	for i := range v.NumField() {
		if !reflect.DeepEqual(v.Field(i).Interface(), w.Field(i).Interface()) {
			return fmt.Sprintf("%s is %v once and %v then", v.Type().Field(i).Name, v.Field(i), w.Field(i))
		}
	}
	return "they differ"
}

// checkMembers finds members that no protocol can have for its own: the flow would strip what clients need.
func checkMembers(members []string) error {
	clients := []string{"model", "stream", "stream_options", "tools", "thinking", "sampling_params", "vllm_xargs",
		"request_id"}
	for api, s := range shapes {
		clients = append(append(append(clients, api.PromptMember(), s.limit, s.alt, s.minimum), s.choices...),
			s.wasted...)
	}
	for i, m := range members {
		switch {
		case slices.Contains(strings.Split(m, "."), ""):
			return fmt.Errorf("its Members have %q, which is no path", m)
		case slices.Contains(members[:i], m):
			return fmt.Errorf("its Members have %s twice", m)
		case slices.Contains(clients, m):
			return fmt.Errorf("its Members have %s, which is the client's: the flow would strip it", m)
		}
	}
	return nil
}

// checkEndsByLength holds the prefill leg to what Traits says of how P must end.
func checkEndsByLength(t *trial) error {
	_, checks := connector.As[connector.PrefillChecker](t.c)
	stopping := func(api connector.API) []sample {
		members := `"stop":["\n"],"stop_token_ids":[13]`
		if api == connector.APIMessages {
			members = `"stop_sequences":["\n"]`
		}
		return []sample{{api, "with stop strings", shapes[api].body(members)}}
	}
	reads := checks || t.traits.Handoff.Named()
	if t.traits.Ending.EndsByLength && check.Of(t.c).Carries(connector.APIMessages) && !reads {
		return errors.New("its Traits says EndsByLength, which nothing in messages forces: be a PrefillChecker, or " +
			"read a Handoff")
	}
	return t.each(stopping, func(smp sample, p *played) error {
		s := shapes[smp.api]
		has := func(body []byte) bool {
			return slices.ContainsFunc(stops, func(name string) bool { return sampled(s, body, name).Exists() })
		}
		if !has([]byte(smp.body)) {
			return nil
		}
		left := has(p.prefill.body)
		forced := sampled(s, p.prefill.body, s.minimum).Exists() || gjson.GetBytes(p.prefill.body, "ignore_eos").Bool()
		switch {
		case t.traits.Ending.EndsByLength && (left || !forced && smp.api != connector.APIMessages):
			return errors.New("its Traits says EndsByLength, but the prefill leg can end otherwise: see " +
				"contract.NewPrefillLeg")
		case !t.traits.Ending.EndsByLength && (!left || forced):
			return errors.New("the prefill leg is made to end by length, which Traits' EndsByLength must say")
		}
		return nil
	})
}

// requestID is the X-Request-Id that the connector gave a leg, or "".
func (l sent) requestID() (id string) {
	for _, h := range l.header {
		if strings.EqualFold(h.Name, "X-Request-Id") {
			id = h.Value
		}
	}
	return id
}

// checkOwnRequestID holds both legs to what Traits says of their id.
func checkOwnRequestID(t *trial) error {
	return t.each(all, func(smp sample, p *played) error {
		id := p.prefill.requestID()
		for name, leg := range p.legs() {
			member := gjson.GetBytes(leg.body, "request_id").Str
			switch {
			case strings.HasPrefix(name, "encode"):
			case !t.traits.OwnRequestID && (leg.requestID() != "" || member != ""):
				return fmt.Errorf("the %s leg has an X-Request-Id of the connector's, which Traits' OwnRequestID "+
					"must say", name)
			case t.traits.OwnRequestID && (leg.requestID() == "" || leg.requestID() != id):
				return fmt.Errorf("its Traits says OwnRequestID, but the %s leg has none, or another than prefill",
					name)
			case t.traits.OwnRequestID && smp.api == connector.APIResponses && member != id:
				return fmt.Errorf("the %s leg has its id not in the body, as /v1/responses needs it: see "+
					"Leg.SetRequestID", name)
			}
		}
		return nil
	})
}
