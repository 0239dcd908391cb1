// SPDX-License-Identifier: Apache-2.0

package wrong

import (
	"context"
	"encoding/json"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
)

// Fault is a connector that breaks one rule.
type Fault struct {
	What   string // what it does
	Breaks string // the rule's name
	New    func(config json.RawMessage) (connector.KVConnector, error)
	Bare   bool // it declares no handoff, so that its harness must give none
}

// faulty is the toy with some of its methods replaced.
type faulty struct {
	*Toy
	traits        func(*connector.Traits)
	checkRequest  func(*connector.ClientRequest) error
	checkEndpoint func(discovery.Endpoint) error
	prepare       func(context.Context, *connector.Session, connector.Caller) (any, error)
	prefill       func(*connector.Session, *connector.Leg) error
	decode        func(*connector.Session, *connector.PrefillResult, *connector.Leg) error
	start         func(context.Context) error
	closes        func() error
	expect        func(*connector.Session) (func(context.Context) (connector.Event, error), func(error))
	final         func(*connector.Session, *connector.PrefillResult) (connector.Response, bool)
	rewrite       func(*connector.Session, func() *connector.PrefillResult) func([]byte) ([]byte, error)
	encode        func(*connector.Session, connector.Item, *connector.Leg) error
	merge         func([]json.RawMessage) error
	clean         func(context.Context, *connector.Session) error
}

// with makes faults of the toy with something replaced.
func with(rule, what string, replace func(f *faulty)) Fault {
	return Fault{What: what, Breaks: rule, New: func(config json.RawMessage) (connector.KVConnector, error) {
		t, err := New(config)
		if err != nil {
			return nil, err
		}
		f := &faulty{Toy: t}
		replace(f)
		return f, nil
	}}
}

// configured makes faults of the toy whose settings are read otherwise.
func configured(rule, what string, read func(config json.RawMessage) (connector.KVConnector, error)) Fault {
	return Fault{What: what, Breaks: rule, New: read}
}

func (f *faulty) Traits() connector.Traits {
	t := f.Toy.Traits()
	if f.traits != nil {
		f.traits(&t)
	}
	return t
}

func (f *faulty) CheckRequest(r *connector.ClientRequest) error {
	if f.checkRequest != nil {
		return f.checkRequest(r)
	}
	return nil
}

func (f *faulty) CheckEndpoint(e discovery.Endpoint) error {
	if f.checkEndpoint != nil {
		return f.checkEndpoint(e)
	}
	return f.Toy.CheckEndpoint(e)
}

func (f *faulty) Prepare(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
	if f.prepare != nil {
		return f.prepare(ctx, s, call)
	}
	return f.Toy.Prepare(ctx, s, call)
}

func (f *faulty) Prefill(ctx context.Context, s *connector.Session, leg *connector.Leg) error {
	if f.prefill != nil {
		return f.prefill(s, leg)
	}
	return f.Toy.Prefill(ctx, s, leg)
}

func (f *faulty) Decode(ctx context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	if f.decode != nil {
		return f.decode(s, p, leg)
	}
	return f.Toy.Decode(ctx, s, p, leg)
}

func (f *faulty) Start(ctx context.Context) error {
	if f.start != nil {
		return f.start(ctx)
	}
	return f.Toy.Start(ctx)
}

func (f *faulty) Close() error {
	if f.closes != nil {
		return f.closes()
	}
	return f.Toy.Close()
}

func (f *faulty) Expect(s *connector.Session) (wait func(context.Context) (connector.Event, error), done func(error)) {
	if f.expect != nil {
		return f.expect(s)
	}
	return f.Toy.Expect(s)
}

func (f *faulty) Final(s *connector.Session, p *connector.PrefillResult) (connector.Response, bool) {
	if f.final != nil {
		return f.final(s, p)
	}
	return f.Toy.Final(s, p)
}

func (f *faulty) Rewrite(s *connector.Session, p func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	if f.rewrite != nil {
		return f.rewrite(s, p)
	}
	return f.Toy.Rewrite(s, p)
}

func (f *faulty) Encode(s *connector.Session, i connector.Item, leg *connector.Leg) error {
	if f.encode != nil {
		return f.encode(s, i, leg)
	}
	return f.Toy.Encode(s, i, leg)
}

func (f *faulty) Merge(s *connector.Session, responses []json.RawMessage) error {
	if f.merge != nil {
		return f.merge(responses)
	}
	return f.Toy.Merge(s, responses)
}

func (f *faulty) Clean(ctx context.Context, s *connector.Session, cause error, call connector.Caller) error {
	if f.clean != nil {
		return f.clean(ctx, s)
	}
	return f.Toy.Clean(ctx, s, cause, call)
}

// right are the toy's own describers, for faults that add something to them.
func (f *faulty) right(s *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
	return f.Toy.Decode(context.Background(), s, p, leg)
}

func (f *faulty) rightPrefill(s *connector.Session, leg *connector.Leg) error {
	return f.Toy.Prefill(context.Background(), s, leg)
}
