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

// faulty is the toy with some of its methods replaced: it has each as a function.
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
		f := &faulty{
			Toy: t, traits: func(*connector.Traits) {},
			checkRequest:  func(*connector.ClientRequest) error { return nil },
			checkEndpoint: t.CheckEndpoint, prepare: t.Prepare, start: t.Start, closes: t.Close, expect: t.Expect,
			final: t.Final, rewrite: t.Rewrite, encode: t.Encode,
			merge: func(responses []json.RawMessage) error { return t.Merge(nil, responses) },
		}
		f.prefill, f.decode = f.rightPrefill, f.right
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
	f.traits(&t)
	return t
}

// declare has the traits changed, if there is something to change.
func (f *faulty) declare(change func(*connector.Traits)) {
	if change != nil {
		f.traits = change
	}
}

func (f *faulty) CheckRequest(r *connector.ClientRequest) error { return f.checkRequest(r) }
func (f *faulty) CheckEndpoint(e discovery.Endpoint) error      { return f.checkEndpoint(e) }
func (f *faulty) Start(ctx context.Context) error               { return f.start(ctx) }
func (f *faulty) Close() error                                  { return f.closes() }

func (f *faulty) Prepare(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
	return f.prepare(ctx, s, call)
}

func (f *faulty) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	return f.prefill(s, leg)
}

func (f *faulty) Decode(_ context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	return f.decode(s, p, leg)
}

func (f *faulty) Expect(s *connector.Session) (wait func(context.Context) (connector.Event, error), done func(error)) {
	return f.expect(s)
}

func (f *faulty) Final(s *connector.Session, p *connector.PrefillResult) (connector.Response, bool) {
	return f.final(s, p)
}

func (f *faulty) Rewrite(s *connector.Session, p func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	return f.rewrite(s, p)
}

func (f *faulty) Encode(s *connector.Session, i connector.Item, leg *connector.Leg) error {
	return f.encode(s, i, leg)
}

func (f *faulty) Merge(_ *connector.Session, responses []json.RawMessage) error {
	return f.merge(responses)
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
