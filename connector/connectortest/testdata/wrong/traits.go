// SPDX-License-Identifier: Apache-2.0

package wrong

import (
	"encoding/json"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

const (
	ruleOwnID    = "both legs have an id of the connector's exactly if Traits declares it"
	ruleByLength = "prefill ends by length exactly if Traits declares it"
	ruleDeclared = "decode reads nothing of P's response that Traits does not declare"
)

// declares makes a fault of the declaration alone.
func declares(rule, what string, change func(t *connector.Traits)) Fault {
	return with(rule, what, func(f *faulty) { f.traits = change })
}

// sends makes a fault that declares something else, and edits each leg once it is right.
func sends(rule, what string, change func(t *connector.Traits), prefill, decode edit) Fault {
	return with(rule, what, func(f *faulty) {
		f.declare(change)
		f.prefill = func(s *connector.Session, leg *connector.Leg) error {
			err := f.rightPrefill(s, leg)
			prefill(s, leg)
			return err
		}
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			err := f.right(s, p, leg)
			decode(s, leg)
			return err
		}
	})
}

func asIs(*connector.Session, *connector.Leg)        {}
func ownID(s *connector.Session, leg *connector.Leg) { leg.SetRequestID(s.ID) }

var ticket = sets("kv_ticket", `"t-1"`)

func nested(_ *connector.Session, leg *connector.Leg) {
	leg.SetAt([]string{"vllm_xargs", "kv", "ticket"}, raw(`"t-1"`))
}

func saysOwnID(t *connector.Traits)    { t.OwnRequestID = true }
func saysByLength(t *connector.Traits) { t.Ending.EndsByLength = true }
func members(names ...string) func(t *connector.Traits) {
	return func(t *connector.Traits) { t.Members = append(t.Members, names...) }
}

var traitsFaults = []Fault{
	declares(ruleTraits, "has a lease that ended before it began",
		func(t *connector.Traits) { t.Handoff.Lease = -time.Second }),
	declares(ruleTraits, "has its order as another order", func(t *connector.Traits) {
		t.OtherOrders = []connector.Order{t.Order}
	}),
	declares(ruleTraits, "has an API that nobody knows", func(t *connector.Traits) {
		t.APIs = []connector.API{connector.APIChat, 99}
	}),
	declares(ruleTraits, "carries what no list names", func(t *connector.Traits) { t.Carries = []string{"prompts"} }),
	declares(ruleTraits, "carries several choices without MultiUse", func(t *connector.Traits) {
		t.Handoff.MultiUse, t.Carries = false, []string{"n"}
	}),
	declares(ruleTraits, "has a handoff in two places", func(t *connector.Traits) { t.Handoff.Header = "X-KV-Ticket" }),
	declares(ruleTraits, "has a store that needs a handoff",
		func(t *connector.Traits) { t.Handoff.ContentStore = true }),
	declares(ruleTraits, "has an attribute without a remedy", func(t *connector.Traits) {
		t.Attributes = append(t.Attributes, attr.Required{Name: "kvHost", Role: discovery.RolePrefill})
	}),
	declares(ruleTraits, "takes the client's prompt", members("messages")),
	declares(ruleTraits, "has a path that ends early", members("vllm_xargs.")),

	sends(ruleOwnID, "says that it names the legs, and does not", saysOwnID, asIs, asIs),
	sends(ruleOwnID, "names the legs, and does not say so", nil, ownID, ownID),
	sends(ruleOwnID, "names one leg", saysOwnID, ownID, asIs),
	sends(ruleOwnID, "names a leg in the header alone", saysOwnID, ownID,
		func(s *connector.Session, leg *connector.Leg) {
			leg.SetHeader("X-Request-Id", s.ID)
		}),
	sends(ruleOwnID, "names decode by the client's id", saysOwnID, ownID,
		func(s *connector.Session, leg *connector.Leg) {
			leg.SetRequestID(s.RequestID)
		}),

	sends(ruleByLength, "says that P ends by length, and leaves stop strings", saysByLength, keeps("stop"), asIs),
	sends(ruleByLength, "has P end by length, and does not say so", nil, drops("stop", "stop_token_ids"), asIs),
	sends(ruleByLength, "says that P ends by length, and leaves the end of sequence", saysByLength,
		drops("min_tokens", "ignore_eos"), asIs),

	decodes(ruleDecode, "sets a member that it does not declare", ticket),
	prefills(rulePrefill, "sets a member on P's leg that it does not declare", ticket),
	decodes(ruleDecode, "sets a member within another that it does not declare", nested),
	sends(rulePrefill, "declares one member and sets its neighbour", members("vllm_xargs.kv.room"), nested, asIs),
	sends(ruleTransfer, "lets the client's own declared member pass", members("kv_ticket"), asIs,
		keeps("kv_ticket")),
	sends(ruleTransfer, "lets the client's own nested member pass", members("vllm_xargs.kv.ticket"), asIs,
		keeps("vllm_xargs")),

	declares(ruleAttribute, "declares an attribute that it does without", func(t *connector.Traits) {
		t.Attributes = append(
			t.Attributes, attr.Required{Name: "zone", Role: discovery.RoleDecode, Remedy: "the zone"},
		)
	}),
	declares(ruleAttribute, "needs an attribute that it does not declare", func(t *connector.Traits) {
		t.Attributes = nil
	}),
	declares(ruleLegs, "declares an order in which it cannot work", func(t *connector.Traits) {
		t.OtherOrders = []connector.Order{connector.Together}
	}),
	with(ruleLegs, "declares an API that it cannot describe", func(f *faulty) {
		f.traits = func(t *connector.Traits) { t.APIs = connector.APIs() }
		f.prefill = func(s *connector.Session, leg *connector.Leg) error {
			if s.API == connector.APISGLang {
				return names.ErrUnknown
			}
			return f.rightPrefill(s, leg)
		}
	}),
	with(ruleUnsupported, "says that its handoff is for many, and refuses several choices", func(f *faulty) {
		f.checkRequest = func(r *connector.ClientRequest) error {
			if v, ok := r.Field("n"); ok && string(v) != "1" {
				return &connector.UnsupportedError{Member: "n"}
			}
			return nil
		}
	}),
}

// undeclared makes a fault that declares no handoff, and reads P's response all the same.
func undeclared(what string, read func(p *connector.PrefillResult, leg *connector.Leg) error) Fault {
	f := with(ruleDeclared, what, func(f *faulty) {
		f.traits = func(t *connector.Traits) { t.Handoff.Member, t.Handoff.Header = "", "" }
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			if err := params(s, leg); err != nil {
				return err
			}
			return read(p, leg)
		}
	})
	f.Bare = true
	return f
}

var undeclaredFaults = []Fault{
	undeclared("needs a part of P's response that it does not declare",
		func(p *connector.PrefillResult, _ *connector.Leg) error {
			if _, ok := p.Field("usage"); !ok {
				return handoff.NoTransfer("usage is absent")
			}
			return nil
		}),
	undeclared("relays a part of P's response that it does not declare",
		func(p *connector.PrefillResult, leg *connector.Leg) error {
			if raw, ok := p.Field("usage"); ok {
				leg.Param("usage", raw)
			}
			return nil
		}),
}

// Undeclared makes a toy that does not declare its handoff, and does without.
func Undeclared(config json.RawMessage) (connector.KVConnector, error) {
	return undeclared("", func(*connector.PrefillResult, *connector.Leg) error { return nil }).New(config)
}
