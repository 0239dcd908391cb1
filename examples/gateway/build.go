// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/registration"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/health"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/reuse"
	"github.com/pdkit/pdkit/transport"
)

// gateway is a configuration at work.
type gateway struct {
	cfg        *config
	log        *slog.Logger
	tel        *telemetry
	mux        *pdflow.Mux
	models     []*model
	transports map[time.Duration]*transport.Transport // by connect timeout: what else differs, flows do
	draining   atomic.Bool
}

// model is one ModelServer at work.
type model struct {
	*modelServer
	set    *discovery.Set
	picker pdflow.Picker
	prober *health.Prober
	legs   *transport.Transport // for what the gateway itself asks this model's engines
	probes probeBook
	server pdflow.Server
	first  []*pdflow.Flow // what the mux routes to: the main flow, and the rollout's
	next   []*pdflow.Flow // what those fall back to
	reuse  *reuse.Canary  // nil unless asked for

	announced *registration.Source // nil unless engines announce themselves
}

// build makes flows of a configuration. It dials and listens nowhere.
func build(cfg *config, tel *telemetry, log *slog.Logger) (*gateway, error) {
	g := &gateway{cfg: cfg, log: log, tel: tel, transports: map[time.Duration]*transport.Transport{}}
	g.mux = pdflow.NewMux(&pdflow.MuxOptions{MaxBody: cfg.gateway.MaxBodyBytes})
	routes := map[string]pdflow.Server{}
	for _, ms := range cfg.models {
		m, err := g.buildModel(ms)
		if err != nil {
			return nil, err
		}
		g.models = append(g.models, m)
		routes[ms.model()] = m.server
	}
	if err := g.mux.SetRoutes(routes); err != nil {
		return nil, err
	}
	return g, tel.observeEndpoints(g.models)
}

func (g *gateway) buildModel(ms *modelServer) (*model, error) {
	source, err := ms.source(g.cfg.file)
	if err != nil {
		return nil, err
	}
	m := &model{modelServer: ms, set: discovery.NewSet(source)}
	m.announced, _ = source.(*registration.Source)
	m.picker = pick.New(m.set, g.cfg.pick)
	m.probes.log = g.log.With("model", ms.model())
	limits, _ := ms.main.limits()
	timeout := limits.HealthCheck
	if timeout == 0 {
		timeout = time.Hour // the prober takes 0 for its default; none is meant
	}
	m.legs = g.transport(limits.Connect)
	m.prober = health.New(m.set, &health.Options{Timeout: timeout, Client: m.legs, Observe: m.probes.observe})
	flow, err := g.buildFlow(m, ms.main)
	if err != nil {
		return nil, err
	}
	m.server, m.first = flow, []*pdflow.Flow{flow}
	if m.reuse, err = g.canary(m); err != nil {
		return nil, err
	}
	if ms.rollout == nil {
		return m, nil
	}
	other, err := g.buildFlow(m, *ms.rollout)
	if err != nil {
		return nil, err
	}
	m.first = append(m.first, other)
	m.server, err = pdflow.NewSplit(flow, other, *ms.spec.Rollout.Weight)
	return m, err
}

// requestCheckers are those of all of the model's connectors, since all of its flows send to the same engines.
func (m *model) requestCheckers() []connector.RequestChecker {
	var all []connector.RequestChecker
	for _, first := range []*opened{&m.main, m.rollout} {
		for o := first; o != nil; o = o.fallback {
			if c, ok := connector.As[connector.RequestChecker](o.connector); ok {
				all = append(all, c)
			}
		}
	}
	return all
}

// buildFlow makes the flow of a connector, and first those that it falls back to.
func (g *gateway) buildFlow(m *model, o opened) (*pdflow.Flow, error) {
	limits, derived := o.limits()
	timeouts := pdflow.DefaultTimeouts()
	timeouts.Prefill, timeouts.Decode, timeouts.Idle, timeouts.Cleanup = limits.Prefill, limits.Decode, limits.Idle, limits.Cleanup
	if !derived {
		timeouts.Handoff = limits.Handoff
	}
	a := o.attempts()
	opts := []pdflow.Option{
		pdflow.WithTransport(g.transport(limits.Connect)),
		pdflow.WithTimeouts(timeouts),
		pdflow.WithRetry(pdflow.Retry{MaxAttempts: a.Max, BackoffBase: a.BackoffBase, BackoffMax: a.BackoffMax}),
		pdflow.WithMaxBody(g.cfg.gateway.MaxBodyBytes),
		pdflow.WithLogger(g.log.With("model", m.model())),
	}
	opts = append(opts, g.tel.options()...)
	opts = append(opts, pdflow.WithRequestCheckers(m.requestCheckers()...))
	if o.spec.Fallback == connector.FallbackDecode {
		opts = append(opts, pdflow.WithFallback(pdflow.FallbackDecode))
	}
	if o.spec.Unsupported == connector.UnsupportedRefuse {
		opts = append(opts, pdflow.WithUnsupported(pdflow.UnsupportedRefuse))
	}
	if o.fallback != nil {
		next, err := g.buildFlow(m, *o.fallback)
		if err != nil {
			return nil, err
		}
		m.next = append(m.next, next)
		opts = append(opts, pdflow.WithFallbackFlow(next))
	}
	conn := o.connector
	if e := m.spec.Encoder.Type; e != "" {
		var err error
		if conn, err = epd.Wrap(conn, &epd.Options{Type: e}); err != nil {
			return nil, err
		}
	}
	return pdflow.New(conn, m.picker, opts...)
}

func (g *gateway) transport(connect time.Duration) *transport.Transport {
	t, ok := g.transports[connect]
	if !ok {
		o := &transport.Options{ConnectTimeout: connect}
		if connect == 0 {
			o.ConnectTimeout = -1 // none; 0 would be the transport's default
		}
		t = transport.New(o)
		g.transports[connect] = t
	}
	return t
}

// flows lists all flows of a model.
func (m *model) flows() []*pdflow.Flow { return append(slices.Clip(m.first), m.next...) }

// start starts the connectors' listeners, and what finds and probes engines, until ctx ends. wait returns when all of
// that has ended.
func (g *gateway) start(ctx context.Context) (wait func(), err error) {
	for _, m := range g.models {
		for _, f := range m.flows() {
			err = errors.Join(err, f.Start(ctx))
		}
		err = errors.Join(err, g.startRegistration(ctx, m))
	}
	if err != nil {
		g.closeRegistrations()
		return nil, err
	}
	var wg sync.WaitGroup
	for _, m := range g.models {
		m.set.OnError(func(err error) { g.log.Warn("discovery", "model", m.model(), "error", err) })
		wg.Go(func() { g.ended("discovery", m.set.Run(ctx)) })
		wg.Go(func() { g.ended("health", m.prober.Run(ctx)) })
		if m.reuse != nil {
			wg.Go(func() { g.ended("canary", m.reuse.Run(ctx)) })
		}
	}
	wait = func() {
		g.closeRegistrations()
		wg.Wait()
	}
	return wait, nil
}

func (g *gateway) ended(what string, err error) {
	if err != nil {
		g.log.Error("ended", "part", what, "error", err)
	}
}

// drain lets the requests in flight end until ctx does, then cuts them. New ones are refused from its first moment.
func (g *gateway) drain(ctx context.Context) {
	// What a request falls back to must be there until the last request is through.
	for _, flows := range []func(*model) []*pdflow.Flow{
		func(m *model) []*pdflow.Flow { return m.first },
		func(m *model) []*pdflow.Flow { return m.next },
	} {
		var wg sync.WaitGroup
		for _, m := range g.models {
			for _, f := range flows(m) {
				wg.Go(func() {
					if err := f.Shutdown(ctx); err != nil && ctx.Err() == nil {
						g.log.Warn("closing a connector", "model", m.model(), "error", err)
					}
				})
			}
		}
		wg.Wait()
	}
}

func (g *gateway) close() {
	for _, t := range g.transports {
		_ = t.Close() // never fails
	}
}

// find returns the model that serves a request, by the mux's rules.
func (g *gateway) find(name string) *model {
	var wildcard *model
	for _, m := range g.models {
		switch m.model() {
		case name:
			return m
		case "*":
			wildcard = m
		}
	}
	if name == "" && len(g.models) == 1 {
		return g.models[0]
	}
	return wildcard
}
