// SPDX-License-Identifier: Apache-2.0

// Package multi is the connector "multi": vLLM's MultiConnector, in which an engine has several connectors at once,
// mostly one that transfers from engine to engine and stores beside it.
//
// Every child sees the same request, so both legs carry the members of all children. An engine saves to all of its
// children and loads from the first child in the list that has the prompt. If that load fails, the request fails,
// whatever the other children hold (docs/protocols/multi.md, recording 06).
//
// [New] finds what children cannot share: two children that answer with a handoff (vLLM merges the handoffs of its
// children and fails on a key that comes twice), orders that have nothing in common, or two children that both need the
// one side call, notice or rewriting that a request can have. If two children set one parameter of a request to
// different values, building the leg fails.
//
// The package also has the connector "kvbm", Dynamo's PdConnector, which is a MultiConnector on P alone: see [NewKVBM].
//
// Facts: vLLM 0.32.0, recorded exchanges (testdata/golden) and kv_connector/v1/multi_connector.py.
package multi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under.
const Name = "multi"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "MultiConnector")
}

// Options are the connector's settings.
type Options struct {
	// Connectors are the children in the engines' order, each as {type, config} or as the engine writes it:
	// {kv_connector, kv_connector_extra_config, kv_role …}. At least one.
	Connectors []json.RawMessage `json:"connectors"`
}

// Connector is the connector "multi" or "kvbm". Make it with [New] or [NewKVBM].
type Connector struct {
	children []Child                 // in the engines' order
	legs     []connector.KVConnector // in the order in which they build the legs
	traits   connector.Traits        // the merged declaration of all children

	mu      sync.Mutex
	started []connector.KVConnector
}

// New opens the children and checks that they can work together. Faults are [config.FieldError]s with paths such as
// connectors[1].config.leaseDuration.
func New(o *Options) (*Connector, error) {
	if o == nil || len(o.Connectors) == 0 {
		return nil, &config.FieldError{Path: "connectors", Problem: "is empty",
			Remedy: "list the engines' connectors: [{type: nixl}, {type: sharedstorage}]"}
	}
	c := &Connector{}
	var errs []error
	for i, raw := range o.Connectors {
		ch, err := openChild(i, raw)
		errs = append(errs, err)
		c.children = append(c.children, ch)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	order, err := commonOrder(c.children)
	if err != nil {
		return nil, err
	}
	if err = checkClashes(c.children); err != nil {
		return nil, err
	}
	c.traits = merge(c.children, order)
	c.legs = describing(c.children)
	return c, nil
}

// Traits returns the merged declaration of all children, with an order that suits all; see [New].
func (c *Connector) Traits() connector.Traits { return c.traits }

// Children returns the connectors of the list, in the engines' order.
func (c *Connector) Children() []Child { return c.children }

// Unwrap returns the children in the engines' order.
func (c *Connector) Unwrap() []connector.KVConnector {
	all := make([]connector.KVConnector, len(c.children))
	for i := range c.children {
		all[i] = c.children[i].KVConnector
	}
	return all
}

// Prefill lets each child edit the leg.
func (c *Connector) Prefill(ctx context.Context, s *connector.Session, leg *connector.Leg) error {
	for _, child := range c.legs {
		if err := child.Prefill(ctx, s, leg); err != nil {
			return err
		}
	}
	return nil
}

// Decode lets each child edit the leg.
func (c *Connector) Decode(ctx context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	for _, child := range c.legs {
		if err := child.Decode(ctx, s, p, leg); err != nil {
			return err
		}
	}
	return nil
}

// have returns the children that have an ability, without repetitions.
func have[T any](c *Connector) []T {
	var all []T
	for i := range c.children {
		if t, ok := connector.As[T](c.children[i].KVConnector); ok {
			all = append(all, t)
		}
	}
	return all
}

// Start starts each child once. If one fails, Start closes those that it has started.
func (c *Connector) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, child := range c.Unwrap() {
		if s, ok := connector.As[connector.Starter](child); ok {
			if err := s.Start(ctx); err != nil {
				return errors.Join(err, c.closeStarted())
			}
		}
		c.started = append(c.started, child)
	}
	return nil
}

// Close closes each child that was started, once.
func (c *Connector) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closeStarted()
}

func (c *Connector) closeStarted() error {
	var errs []error
	for _, child := range c.started {
		if closer, ok := connector.As[io.Closer](child); ok {
			errs = append(errs, closer.Close())
		}
	}
	c.started = nil
	return errors.Join(errs...)
}

// HealthCheck returns the errors of the children that are not healthy.
func (c *Connector) HealthCheck(ctx context.Context) error {
	var errs []error
	for _, h := range have[connector.HealthChecker](c) {
		errs = append(errs, h.HealthCheck(ctx))
	}
	return errors.Join(errs...)
}

// CheckRequest refuses a request that any child refuses. It returns a refusal before an error that only says that two
// engines cannot serve the request.
func (c *Connector) CheckRequest(r *connector.ClientRequest) error {
	var unsupported error
	for _, k := range have[connector.RequestChecker](c) {
		err := k.CheckRequest(r)
		if _, ok := errors.AsType[*connector.UnsupportedError](err); err != nil && !ok {
			return err
		}
		unsupported = cmp.Or(unsupported, err)
	}
	return unsupported
}

// Clean lets each child clean up.
func (c *Connector) Clean(ctx context.Context, s *connector.Session, cause error, call connector.Caller) error {
	var errs []error
	for _, k := range have[connector.Cleaner](c) {
		errs = append(errs, k.Clean(ctx, s, cause, call))
	}
	return errors.Join(errs...)
}

// Expect lets each child register what it waits for. The wait ends when all of them have ended. The event is that of
// the only child that is not a store, if it waits.
func (c *Connector) Expect(s *connector.Session) (wait func(context.Context) (connector.Event, error),
	done func(error)) {
	type waiting struct {
		wait  func(context.Context) (connector.Event, error)
		tells bool
	}
	var waits []waiting
	var dones []func(error)
	for i := range c.children {
		e, ok := connector.As[connector.Expecter](c.children[i].KVConnector)
		if !ok {
			continue
		}
		w, d := e.Expect(s)
		if w != nil {
			waits = append(waits, waiting{w, !c.children[i].traits.Handoff.ContentStore})
		}
		if d != nil {
			dones = append(dones, d)
		}
	}
	done = func(err error) {
		for _, d := range dones {
			d(err)
		}
	}
	if len(waits) > 0 {
		wait = func(ctx context.Context) (event connector.Event, err error) {
			for _, w := range waits {
				ev, err := w.wait(ctx)
				if err != nil {
					return ev, err
				}
				if w.tells {
					event = ev
				}
			}
			return event, nil
		}
	}
	return wait, done
}

// CheckEndpoint reports what an engine's entry lacks for any child.
func (c *Connector) CheckEndpoint(e discovery.Endpoint) error {
	var errs []error
	for _, k := range have[connector.EndpointChecker](c) {
		errs = append(errs, k.CheckEndpoint(e))
	}
	return errors.Join(errs...)
}
