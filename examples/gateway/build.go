// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/discovery/registration"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/health"
	"github.com/pdkit/pdkit/pdflow/modelserver"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/reuse"
	"github.com/pdkit/pdkit/transport"
	"go.opentelemetry.io/otel/attribute"
)

// gateway is a configuration at work.
type gateway struct {
	cfg      *configuration
	log      *slog.Logger
	tel      *telemetry
	mux      *pdflow.Mux
	budget   *pdflow.Budget
	routing  sync.RWMutex // the list of models and the mux's routes change together
	cluster  *cluster     // nil unless its ModelServers are served
	draining atomic.Bool
	list     atomic.Pointer[[]*model]
}

// model is one ModelServer at work.
type model struct {
	*modelServer
	set    *discovery.Set
	picker pdflow.Picker
	prober *health.Prober
	probes probeBook
	flows  *modelserver.Flows

	admission *admit.Picker // nil where it is off

	legs *transport.Transport // the main flow's, also for what the gateway itself asks engines

	announced *registration.Source // nil unless engines announce themselves

	life  context.Context // from start to end
	stop  context.CancelFunc
	parts sync.WaitGroup
}

// build makes the flows of a configuration. It does not dial and does not listen.
func build(cfg *configuration, tel *telemetry, log *slog.Logger) (*gateway, error) {
	g := &gateway{cfg: cfg, log: log, tel: tel}
	g.budget = pdflow.NewBudget(cfg.gateway.bytesInFlight())
	g.mux = pdflow.NewMux(&pdflow.MuxOptions{MaxBody: cfg.gateway.MaxBodyBytes, Budget: g.budget})
	var models []*model
	for _, ms := range cfg.models {
		m, err := g.buildModel(ms)
		if err != nil {
			return nil, err
		}
		models = append(models, m)
	}
	if err := g.setModels(models); err != nil {
		return nil, err
	}
	if cfg.gateway.ModelServers != nil {
		var err error
		if g.cluster, err = newCluster(g, cfg.gateway.ModelServers); err != nil {
			return nil, err
		}
	}
	return g, errors.Join(tel.observeEndpoints(g.models), tel.observeBytes(g.budget))
}

// models are those that are served now.
func (g *gateway) models() []*model { return *g.list.Load() }

// setModels replaces the models that are served.
func (g *gateway) setModels(models []*model) error {
	routes := make(map[string]pdflow.Server, len(models))
	for _, m := range models {
		routes[m.Model()] = m.flows.Server
	}
	g.routing.Lock()
	defer g.routing.Unlock()
	g.list.Store(&models)
	return g.mux.SetRoutes(routes)
}

func (g *gateway) buildModel(ms *modelServer) (*model, error) {
	m := &model{modelServer: ms}
	m.probes.log = g.log.With("model", ms.Model())
	source, err := ms.source(g.cfg.file, func(err error) { m.probes.log.Warn("discovery", "error", err) })
	if err != nil {
		return nil, err
	}
	m.announced, _ = source.(*registration.Source)
	limits := ms.AdmitOptions()
	if g.cfg.inspect > 0 {
		o := &inspect.Options{Interval: g.cfg.inspect}
		if limits != nil {
			o.LoadInterval = time.Second
		}
		inspected := inspect.Wrap(source, o)
		if source = inspected; limits != nil {
			limits.Load = func(id string) inspect.Load {
				r, _ := inspected.Reading(id)
				return r.Load
			}
		}
	}
	m.set = discovery.NewSet(source)
	m.picker = pick.New(m.set, g.cfg.pick)
	admitting, err := g.admitting(m, limits)
	if err != nil {
		return nil, err
	}
	timeouts := ms.Main.Timeouts()
	timeout := timeouts.HealthCheck
	if timeout == config.None {
		timeout = time.Hour // the prober knows no probe without an end
	}
	m.legs = modelserver.NewTransport(timeouts.Connect, g.cfg.netHTTP)
	m.prober = health.New(m.set, &health.Options{Timeout: timeout, Client: m.legs, Observe: m.probes.observe})
	m.flows, err = ms.Flows(admitting, &modelserver.FlowOptions{
		Transport: func(connect time.Duration) http.RoundTripper {
			if connect == timeouts.Connect {
				return m.legs
			}
			return nil // connectors that differ have one of their own
		},
		NetHTTP: g.cfg.netHTTP,
		Options: append(g.tel.options(), pdflow.WithMaxBody(g.cfg.gateway.MaxBodyBytes), pdflow.WithBudget(g.budget),
			pdflow.WithLogger(m.probes.log),
			pdflow.WithMetricAttributes(g.modelAttributes(ms.Model())...)),
	})
	return m, err
}

// admitting returns the picker of the model's flows, with limits unless they are nil. What passes to engines and is no
// inference does not count.
func (g *gateway) admitting(m *model, limits *admit.Options) (pdflow.Picker, error) {
	if limits == nil {
		return m.picker, nil
	}
	if limits.Attributes = g.modelAttributes(m.Model()); g.tel.meters != nil {
		limits.MeterProvider = g.tel.meters
	}
	var err error
	m.admission, err = admit.New(m.picker, limits)
	return m.admission, err
}

// modelAttributes are what tells the metrics of several models apart.
func (g *gateway) modelAttributes(model string) []attribute.KeyValue {
	if len(g.cfg.models) <= 1 && g.cfg.gateway.ModelServers == nil {
		return nil
	}
	return []attribute.KeyValue{attribute.String("gen_ai.request.model", model)}
}

// start starts all models, and the watch for more of them, until ctx ends. wait returns when all of that has ended.
func (g *gateway) start(ctx context.Context) (wait func(), err error) {
	var started []*model
	for _, m := range g.models() {
		if err = m.start(ctx, g); err != nil {
			break
		}
		started = append(started, m)
	}
	if err != nil {
		for _, m := range started {
			m.end()
		}
		return nil, err
	}
	var wg sync.WaitGroup
	if g.cluster != nil {
		wg.Go(func() { ended(g.log, "ModelServers", g.cluster.run(ctx)) })
	}
	wait = func() {
		if g.cluster != nil {
			g.cluster.cut()
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			wg.Wait()
			for _, m := range g.models() {
				m.end()
			}
		}()
		select {
		case <-done:
		// a program that a kubeconfig names for its credentials takes its time, and nothing stops it
		case <-time.After(lastPatience):
			g.log.Warn("ended without waiting for all that finds engines")
		}
	}
	return wait, nil
}

// start starts the connectors' listeners, discovery and health probes of the model, until end or ctx's end.
func (m *model) start(ctx context.Context, g *gateway) error {
	m.life, m.stop = context.WithCancel(ctx)
	err := errors.Join(m.flows.Start(m.life), m.startRegistration(m.life, g.log))
	var prober *reuse.SyntheticProber
	if err == nil {
		prober, err = g.syntheticProber(m)
	}
	if err != nil {
		m.stop()
		m.drain(m.life, g.log) // at once, since nobody has sent a request yet
		m.end()
		return err
	}
	log := g.log.With("model", m.Model())
	m.set.OnError(func(err error) { log.Warn("discovery", "error", err) })
	m.parts.Go(func() { ended(log, "discovery", m.set.Run(m.life)) })
	m.parts.Go(func() { ended(log, "health", m.prober.Run(m.life)) })
	m.parts.Go(func() {
		told := map[string]string{}
		for snap := range m.set.Changes(m.life) {
			m.probes.keep(snap.Endpoints)
			told = m.tellUnfit(snap.Endpoints, told, log)
		}
	})
	if prober != nil {
		m.parts.Go(func() { ended(log, "synthetic probe", prober.Run(m.life)) })
	}
	return nil
}

// tellUnfit logs, once for each, the engines that cannot be in a pair because their entries lack what a connector
// needs. told holds the reasons that were logged, by ID.
func (m *model) tellUnfit(endpoints []discovery.Endpoint, told map[string]string,
	log *slog.Logger) (now map[string]string) {
	now = map[string]string{}
	for _, flow := range m.flows.First() {
		for _, e := range endpoints {
			if err := connector.CheckEndpoint(flow.Connector(), e); err != nil {
				now[e.ID] = err.Error()
			}
		}
	}
	fresh := slices.DeleteFunc(slices.Sorted(maps.Keys(now)), func(id string) bool { return told[id] == now[id] })
	if len(fresh) > 0 {
		log.Warn("engines are left out of pairs", "endpoint", fresh[0], "reason", shorten(now[fresh[0]]), "others",
			len(fresh)-1)
	}
	return now
}

// end stops what start has started, after the last request.
func (m *model) end() {
	m.stop()
	if m.announced != nil {
		_ = m.announced.Close() // never fails
	}
	m.parts.Wait()
	_ = m.legs.Close() // never fails
	if m.admission != nil {
		_ = m.admission.Close() // never fails
	}
}

func ended(log *slog.Logger, what string, err error) {
	if err != nil {
		log.Error("ended", "part", what, "error", err)
	}
}

// drain refuses new requests from its first moment, waits for those in flight until ctx ends, then cuts them.
func (g *gateway) drain(ctx context.Context) {
	var wg sync.WaitGroup
	if g.cluster != nil {
		g.cluster.halt() // from here on the models are those that they are
		select {
		case <-g.cluster.halted:
			wg.Go(func() { g.cluster.drained(ctx) })
		case <-ctx.Done(): // what leaves is cut at the end: see start
		}
	}
	for _, m := range g.models() {
		wg.Go(func() { m.drain(ctx, g.log) })
	}
	wg.Wait()
}

func (m *model) drain(ctx context.Context, log *slog.Logger) {
	if err := m.flows.Shutdown(ctx); err != nil && ctx.Err() == nil {
		log.Warn("closing a connector", "model", m.Model(), "error", err)
	}
}

// find returns the model that serves a request, by the same rules as the mux.
func (g *gateway) find(name string) *model {
	g.routing.RLock()
	defer g.routing.RUnlock()
	server, _ := g.mux.Lookup(name)
	for _, m := range g.models() {
		if m.flows.Server == server {
			return m
		}
	}
	return nil
}
