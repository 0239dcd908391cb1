// SPDX-License-Identifier: Apache-2.0

// Package relay is the connector "relay", for engines whose P says in its response where the KV is and whose D gets
// that as it is. The settings say where it stands: a member of the body, or a header. P runs first; D gets P's bytes
// unchanged, once, and only before P's lease ends.
//
// It also is the connector "tpu", which is a relay with the rules of tpu-inference's TPUConnector; see tpu.go.
//
// A protocol that needs more than this (an id that the gateway makes, legs that run together, a notice) needs a
// connector of its own.
package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Name is the name that the connector with free settings is registered under.
const Name = "relay"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	})
}

// Connector is the connector "relay" or "tpu". Make it with [New] or [NewTPU].
type Connector struct {
	name   string
	member []string // path of the member that carries the parameters; nil with a header alone
	header string   // of P's response; "" if they are in the body
	ask    json.RawMessage
	check  func(json.RawMessage) error // of what stands in the member
	empty  bool                        // an empty object is passed on
	length bool
	lease  time.Duration
	usage  connector.Serving
	rules  []attr.PairRule
}

// New checks the settings. nil means defaults: P's kv_transfer_params, of which no key is required.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	if err := o.fault(); err != nil {
		return nil, err
	}
	c := &Connector{name: Name, header: o.Header, ask: o.Prefill, empty: o.PassEmpty, length: o.EndsByLength}
	if o.LeaseDuration != nil {
		c.lease = time.Duration(*o.LeaseDuration)
	}
	if o.Member != "" || o.Header == "" {
		c.member = strings.Split(o.member(), ".")
	}
	c.check = func(raw json.RawMessage) error { return hasKeys(raw, o.Required) }
	return c, nil
}

// Traits declares the protocol as the settings have it. What P's response names is read once.
func (c *Connector) Traits() connector.Traits {
	t := connector.Traits{Name: c.name, Handoff: connector.Handoff{Lease: c.lease},
		Ending: connector.Ending{EndsByLength: c.length}, PairRules: c.rules, Serving: c.usage}
	if c.member != nil {
		t.Members = []string{strings.Join(c.member, ".")}
	}
	if t.Handoff.Header = c.header; c.header == "" {
		t.Handoff.Member = t.Members[0]
	}
	return t
}

// Prefill asks P for one token, with the parameters of the setting prefill.
func (c *Connector) Prefill(_ context.Context, _ *connector.Session, leg *connector.Leg) error {
	if c.ask != nil {
		c.set(leg, c.ask)
	}
	return nil
}

// Decode gives D what P has named, byte for byte, after checking it. If it is not as it must be, the error is
// [connector.ErrNoTransfer].
func (c *Connector) Decode(_ context.Context, _ *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	if c.header != "" {
		value, err := handoff.Header(p, c.header)
		switch {
		case err != nil:
			return err
		case c.member == nil:
			leg.SetHeader(c.header, value)
		default:
			c.set(leg, connector.Quote(value))
		}
		return nil
	}
	var found json.RawMessage
	_, err := handoff.Member(p, c.member[0], func(raw json.RawMessage) (err error) {
		if found, err = within(raw, c.member[1:]); err != nil {
			return err
		}
		if c.empty && isEmpty(found) {
			return nil
		}
		return c.check(found)
	})
	if err != nil {
		return err
	}
	c.set(leg, found)
	return nil
}

// set gives a leg its parameters.
func (c *Connector) set(leg *connector.Leg, raw json.RawMessage) {
	if len(c.member) == 1 && c.member[0] == connector.ParamsMember && jsonedit.Kind(raw) == jsonedit.Object {
		leg.Params(raw) // so that a multi connector's other children can add theirs
		return
	}
	leg.SetAt(c.member, raw)
}

// within finds a nested member.
func within(raw json.RawMessage, path []string) (json.RawMessage, error) {
	for _, name := range path {
		o := handoff.Read(raw)
		inner, ok := o.Get(name)
		if !ok {
			o.Fault(name, "is absent or null")
		}
		if err := o.Close(); err != nil {
			return nil, err
		}
		raw = inner
	}
	return raw, nil
}

// isEmpty reports whether raw is an object without members.
func isEmpty(raw json.RawMessage) bool {
	d, err := jsonedit.Parse(raw)
	return err == nil && d.Len() == 0
}

// hasKeys checks an object of P's: well-formed, not empty, and with all keys, each of its kind.
func hasKeys(raw json.RawMessage, keys map[string]string) error {
	o := handoff.Read(raw)
	if o.Err() == nil && isEmpty(raw) {
		o.Fault("the object", "is empty")
	}
	for key, kind := range keys {
		kinds[kind](o, key)
	}
	return o.Close()
}

// kinds are the checks of a key's value.
var kinds = map[string]func(o *handoff.Object, key string){
	"string":  func(o *handoff.Object, key string) { o.Text(key) },
	"integer": func(o *handoff.Object, key string) { o.Int(key, math.MinInt64, math.MaxInt64) },
	"list":    func(o *handoff.Object, key string) { filled(o, key, jsonedit.Array) },
	"object":  func(o *handoff.Object, key string) { filled(o, key, jsonedit.Object) },
	"flag":    func(o *handoff.Object, key string) { o.True(key) },
}

// filled requires a list or an object that is not empty.
func filled(o *handoff.Object, key string, kind jsonedit.ValueKind) {
	raw, ok := o.Get(key)
	if !ok || jsonedit.Kind(raw) != kind || len(bytes.TrimSpace(raw[1:len(raw)-1])) == 0 {
		o.Fault(key, "is missing, empty or of another kind")
	}
}

var blockRule = []attr.PairRule{attr.Same(attr.BlockSize)}
