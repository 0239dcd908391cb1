// SPDX-License-Identifier: Apache-2.0

package wrong

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

const (
	ruleResponses = "a malformed prefill response never becomes a decode leg"
	ruleHandoff   = "unknown keys and big integers of a handoff are no fault and keep their digits"
	ruleNulls     = "a member of an engine's that is null is as one that is absent"
	ruleHostile   = "whatever engines respond, nothing panics"
	ruleIPv6      = "IPv6 engines get brackets where an address has a port"
	ruleAttribute = "an engine without a declared attribute is refused, and needs no other"
	ruleSecrets   = "errors hold no prompt, address or value" //nolint:gosec // a rule, not a secret
)

// relays makes a fault that treats the handoff in its own way.
func relays(rule, what string, relay func(s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error) Fault {
	return with(rule, what, func(f *faulty) {
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			if p == nil {
				return handoff.NoTransfer("prefill has not answered")
			}
			return relay(s, p, leg)
		}
	})
}

var responseFaults = []Fault{
	relays(ruleResponses, "relays whatever P answered", func(_ *connector.Session, p *connector.PrefillResult,
		leg *connector.Leg) error {
		if h, ok := p.Field(connector.ParamsMember); ok {
			leg.Set(connector.ParamsMember, h)
		}
		return nil
	}),
	relays(ruleResponses, "asks for an object and no more", func(_ *connector.Session, p *connector.PrefillResult,
		leg *connector.Leg) error {
		h, ok := p.Field(connector.ParamsMember)
		if !ok || h[0] != '{' {
			return handoff.NoTransfer("no object")
		}
		leg.Set(connector.ParamsMember, h)
		return nil
	}),
	relays(ruleResponses, "panics where the handoff is no object",
		func(_ *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			var m map[string]any
			if err := json.Unmarshal(p.Body, &m); err != nil {
				return connector.ErrNoTransfer
			}
			h := m[connector.ParamsMember].(map[string]any) //nolint:errcheck // that is the fault
			leg.Set(connector.ParamsMember, connector.Quote(fmt.Sprint(h)))
			return nil
		}),
	with(ruleResponses, "panics without a response", func(f *faulty) {
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			if len(p.Body) == 0 {
				return connector.ErrNoTransfer
			}
			return f.right(s, p, leg)
		}
	}),

	relays(ruleHandoff, "sends the handoff through a map", func(_ *connector.Session, p *connector.PrefillResult,
		leg *connector.Leg) error {
		h, err := Handoff(p)
		if err != nil {
			return err
		}
		var m map[string]any
		if json.Unmarshal(h, &m) != nil {
			return connector.ErrNoTransfer
		}
		again, err := json.Marshal(m)
		leg.Params(again)
		return err
	}),
	relays(ruleHandoff, "refuses keys that it does not know", func(_ *connector.Session, p *connector.PrefillResult,
		leg *connector.Leg) error {
		h, err := Handoff(p)
		if err != nil {
			return err
		}
		var m map[string]json.RawMessage
		if json.Unmarshal(h, &m) != nil || len(m) > 2 {
			return handoff.NoTransfer("an unknown key")
		}
		leg.Params(h)
		return nil
	}),

	relays(ruleNulls, "refuses a null where the key may be absent", func(_ *connector.Session,
		p *connector.PrefillResult, leg *connector.Leg) error {
		h, err := Handoff(p)
		if err != nil {
			return err
		}
		var m map[string]json.RawMessage
		if json.Unmarshal(h, &m) != nil || string(m["remote_size"]) == "null" {
			return handoff.NoTransfer("no size")
		}
		leg.Params(h)
		return nil
	}),
	relays(ruleNulls, "reads a null as a value", func(_ *connector.Session, p *connector.PrefillResult,
		leg *connector.Leg) error {
		h, err := Handoff(p)
		if err != nil {
			return err
		}
		leg.Params(h)
		if bytes.Contains(h, []byte(`"remote_size":null`)) {
			leg.Param("size", raw("0"))
		}
		return nil
	}),
	with(ruleNulls, "takes a null where the key must not be absent", func(f *faulty) {
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			v, err := f.Toy.Prepare(ctx, s, func(r *http.Request) (*http.Response, error) {
				resp, err := call(r)
				if err == nil {
					body, _ := io.ReadAll(resp.Body)
					body = bytes.ReplaceAll(body, []byte(`null`), []byte(`"none"`))
					resp.Body = io.NopCloser(bytes.NewReader(body))
				}
				return resp, err
			})
			return v, err
		}
	}),

	with(ruleHostile, "panics where a response has no choices", func(f *faulty) {
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			if c, ok := p.Field("usage"); ok && c[0] != '{' {
				panic("usage")
			}
			return f.right(s, p, leg)
		}
	}),
	with(ruleHostile, "panics at a side call's response", func(f *faulty) {
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			return f.Toy.Prepare(ctx, s, func(r *http.Request) (*http.Response, error) {
				resp, err := call(r)
				if err == nil && resp.StatusCode != http.StatusOK {
					panic("status")
				}
				return resp, err
			})
		}
	}),
	with(ruleHostile, "panics at an event", func(f *faulty) {
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			_ = s.Event.Body[0]
			return f.right(s, p, leg)
		}
	}),
	with(ruleHostile, "relays a handoff that is not JSON", func(f *faulty) {
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			err := f.right(s, p, leg)
			if err == nil {
				if u, ok := p.Field("usage"); !ok || u[0] != '{' {
					leg.Set(connector.ParamsMember, raw("{,}"))
				}
			}
			return err
		}
	}),
}

var endpointFaults = []Fault{
	decodes(ruleIPv6, "writes an address without brackets", func(s *connector.Session, leg *connector.Leg) {
		leg.Param("remote_host", connector.Quote(s.Prefill.Host()+":"+s.Prefill.Attribute("kvPort")))
	}),
	with(ruleIPv6, "asks at an address without brackets", func(f *faulty) {
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			return f.Toy.Prepare(ctx, s, func(r *http.Request) (*http.Response, error) {
				r.URL = &url.URL{Scheme: "http", Host: s.Prefill.Host() + ":9000", Path: "/engine"}
				return call(r)
			})
		}
	}),

	with(ruleAttribute, "panics without the attribute", func(f *faulty) {
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			if s.Prefill.Attributes["kvPort"][0] == ' ' {
				return nil, names.ErrUnknown
			}
			return f.Toy.Prepare(ctx, s, call)
		}
	}),
	with(ruleAttribute, "returns a plain error", func(f *faulty) {
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			v, err := f.Toy.Prepare(ctx, s, call)
			if err != nil {
				err = errors.New("the engine cannot be used")
			}
			return v, err
		}
	}),
	with(ruleAttribute, "says nothing when the configuration is checked", func(f *faulty) {
		f.checkEndpoint = func(discovery.Endpoint) error { return nil }
	}),
	with(ruleAttribute, "says it of another place", func(f *faulty) {
		f.checkEndpoint = func(e discovery.Endpoint) error {
			if f.Toy.CheckEndpoint(e) == nil {
				return nil
			}
			return &config.FieldError{Path: "kvPort", Problem: "is missing"}
		}
	}),

	with(ruleSecrets, "shows the handoff", func(f *faulty) {
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			err := f.right(s, p, leg)
			if err != nil && p != nil {
				err = fmt.Errorf("%w: %s", err, p.Body)
			}
			return err
		}
	}),
	with(ruleSecrets, "shows the prompt", func(f *faulty) {
		f.decode = func(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
			err := f.right(s, p, leg)
			if err != nil {
				err = fmt.Errorf("%w: %s", err, s.Request.Body())
			}
			return err
		}
	}),
	with(ruleSecrets, "shows an address", func(f *faulty) {
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			v, err := f.Toy.Prepare(ctx, s, call)
			if err != nil {
				err = fmt.Errorf("asking %s: %w", s.Prefill.URL, err)
			}
			return v, err
		}
	}),
	with(ruleSecrets, "shows an attribute", func(f *faulty) {
		f.prepare = func(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
			v, err := f.Toy.Prepare(ctx, s, call)
			if err != nil {
				err = fmt.Errorf("kvPort %s: %w", s.Prefill.Attribute("kvPort"), err)
			}
			return v, err
		}
	}),
}
