// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

// FlowOptions are the settings of flows that an object does not have. nil is the defaults.
type FlowOptions struct {
	// Transport returns the client that sends legs with this timeouts.connect. Where it returns nil, the flows make a
	// transport, which Shutdown closes. Flows calls it once for each connector. A nil Transport is the same as one that
	// returns nil.
	Transport func(connect time.Duration) http.RoundTripper
	NetHTTP   bool            // the flows' own transports send by net/http's client: see transport.Options
	Options   []pdflow.Option // of each flow; those that the object's own settings make come after them
}

// Flows are the flows of one ModelServer: one for its connector, one for its rollout, and those that they fall back to.
// Methods may be called concurrently.
type Flows struct {
	Server      pdflow.Server // for [pdflow.Mux.SetRoutes]
	Main        *pdflow.Flow  // with the object's own connector
	first, next []*pdflow.Flow
	reached     []*pdflow.Flow
	owned       map[time.Duration]*transport.Transport
}

// Flows makes the flows of an object that was read without a fault. All of them use the picker. Flows does not dial and
// does not listen.
func (m *ModelServer) Flows(p pdflow.Picker, o *FlowOptions) (*Flows, error) {
	if err := errors.Join(m.faults...); err != nil {
		return nil, err
	}
	if o == nil {
		o = &FlowOptions{}
	}
	b := &builder{m: m, picker: p, o: *o, flows: &Flows{owned: map[time.Duration]*transport.Transport{}}}
	if err := b.build(); err != nil {
		return nil, errors.Join(err, b.flows.close())
	}
	return b.flows, nil
}

// First returns the flows that take requests first: the main flow and that of the rollout. A flow whose share is 0 is
// not among them.
func (f *Flows) First() []*pdflow.Flow { return slices.Clone(f.reached) }

// All returns all flows.
func (f *Flows) All() []*pdflow.Flow { return append(slices.Clip(f.first), f.next...) }

// Start starts the listeners of the connectors that have one, as [pdflow.Flow.Start] does. The error is for operators:
// it says why a listener could not start.
func (f *Flows) Start(ctx context.Context) error {
	var errs []error
	for _, flow := range f.All() {
		err := flow.Start(ctx)
		if e, ok := errors.AsType[*pdflow.Error](err); ok && e.Err != nil {
			err = fmt.Errorf("connector %s could not start: %w", e.Connector, e.Err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Shutdown refuses new requests, waits for the running ones until ctx ends, then cuts them and closes the connectors. A
// flow that others fall back to stays until their last request has ended.
func (f *Flows) Shutdown(ctx context.Context) error {
	var mu sync.Mutex
	var errs []error
	for _, flows := range [][]*pdflow.Flow{f.first, f.next} {
		var wg sync.WaitGroup
		for _, flow := range flows {
			wg.Go(func() {
				err := flow.Shutdown(ctx)
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
			})
		}
		wg.Wait()
	}
	return errors.Join(append(errs, f.close())...)
}

func (f *Flows) close() error {
	var err error
	for _, t := range f.owned {
		err = errors.Join(err, t.Close())
	}
	return err
}

// NewTransport returns a transport for a timeouts.connect, with the TLS settings of the object. It is to be closed.
// netHTTP is [transport.Options].NetHTTP. The error names a file of [Spec.TLS] that cannot be used.
func (m *ModelServer) NewTransport(connect time.Duration, netHTTP bool) (*transport.Transport, error) {
	o := &transport.Options{ConnectTimeout: connect, NetHTTP: netHTTP}
	if f := m.Spec.TLS; f != (TLS{}) {
		var err error
		if o.GetTLS, err = transport.TLSFiles(f.CAFile, f.CertFile, f.KeyFile, f.ServerName); err != nil {
			return nil, fmt.Errorf("spec.tls: %w", err)
		}
	}
	return transport.New(o), nil
}

func (b *builder) transport(connect time.Duration) (http.RoundTripper, error) {
	if b.o.Transport != nil {
		if t := b.o.Transport(connect); t != nil {
			return t, nil
		}
	}
	t, ok := b.flows.owned[connect]
	if !ok {
		var err error
		if t, err = b.m.NewTransport(connect, b.o.NetHTTP); err != nil {
			return nil, err
		}
		b.flows.owned[connect] = t
	}
	return t, nil
}

// builder makes flows.
type builder struct {
	m      *ModelServer
	picker pdflow.Picker
	o      FlowOptions
	flows  *Flows
}

func (b *builder) build() (err error) {
	f := b.flows
	if f.Main, err = b.flow(b.m.Main); err != nil {
		return err
	}
	f.Server, f.first, f.reached = f.Main, []*pdflow.Flow{f.Main}, []*pdflow.Flow{f.Main}
	if b.m.Rollout == nil {
		return nil
	}
	other, err := b.flow(b.m.Rollout)
	if err != nil {
		return err
	}
	f.first = append(f.first, other)
	share := *b.m.Spec.Rollout.Weight
	switch share {
	case 0:
	case 100:
		f.reached = []*pdflow.Flow{other}
	default:
		f.reached = f.first
	}
	f.Server, err = f.Main.Split(other, share)
	return err
}

// flow makes the flow of a connector, after those that it falls back to.
func (b *builder) flow(c *Connector) (*pdflow.Flow, error) {
	limits := c.Timeouts()
	legs, err := b.transport(limits.Connect)
	if err != nil {
		return nil, err
	}
	opts := append(slices.Clip(b.o.Options),
		pdflow.WithTransport(legs),
		pdflow.WithTimeouts(limits),
		pdflow.WithRetry(c.Retry()),
		pdflow.WithUnsupported(c.Spec.Unsupported),
		pdflow.WithRescue(b.m.Spec.Rescue.perRequest()),
		pdflow.WithKeepAlive(time.Duration(b.m.Spec.KeepAlive.After)),
		pdflow.WithRequestCheckers(b.requestCheckers()...))
	opts = append(opts, b.m.namedModels()...)
	if b.m.Spec.Usage == UsageEngine {
		opts = append(opts, pdflow.WithEngineUsage())
	}
	var others []*pdflow.Flow
	if c.Fallback != nil {
		next, err := b.flow(c.Fallback)
		if err != nil {
			return nil, err
		}
		b.flows.next = append(b.flows.next, next)
		others = append(others, next)
	}
	opts = append(opts, pdflow.WithFallback(c.Spec.Fallback, others...))
	return pdflow.New(c.KVConnector, b.picker, opts...)
}

// requestCheckers returns the checkers of all connectors: all flows send to the same engines, so that a request which
// harms the engines of one connector must not come through another.
func (b *builder) requestCheckers() []connector.RequestChecker {
	var all []connector.RequestChecker
	for _, first := range []*Connector{b.m.Main, b.m.Rollout} {
		for c := first; c != nil; c = c.Fallback {
			if checker, ok := connector.As[connector.RequestChecker](c.KVConnector); ok {
				all = append(all, checker)
			}
		}
	}
	return all
}
