// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"

	kv "github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/modelserver"
	"github.com/pdkit/pdkit/pdflow/passthrough"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// gateway is a configuration at work.
type gateway struct {
	cfg      atomic.Pointer[configuration] // that is served
	log      *slog.Logger
	tel      *telemetry
	mux      *pdflow.Mux
	budget   *pdflow.Budget
	routing  sync.RWMutex // the list of models and the mux's routes change together
	modelSet *modelSet
	draining atomic.Bool
	list     atomic.Pointer[[]*model]
	other    atomic.Pointer[passthrough.Handler] // of what no flow serves

	secure    atomic.Pointer[tls.Config] // of the clients' connections; nil without TLS
	reloading reloading
}

// model is one ModelServer at work.
type model struct {
	*modelServer
	*pool
	admission   *admission   // nil where it is off
	decision    *decision    // nil where each request is split
	attestation *attestation // set by startAttestation
	flows       *modelserver.Flows
	passing     *passthrough.Engines // for requests that are no inference
	recent      *recent

	ctx   context.Context // from start to end
	stop  context.CancelFunc
	parts sync.WaitGroup
}

// asked is the model that the gateway's own requests name; "" where it serves all names.
func (m *modelServer) asked() string {
	if m.Model() == "*" {
		return ""
	}
	return m.Model()
}

// served is asked as engines know it, for who asks them directly.
func (m *model) served() string {
	if m.ServedModel() == "*" {
		return ""
	}
	return m.ServedModel()
}

// build makes the gateway of a configuration. It does not dial and does not listen, and serves no model yet.
func build(cfg *configuration, tel *telemetry, log *slog.Logger) (*gateway, error) {
	g := &gateway{log: log, tel: tel}
	g.cfg.Store(cfg)
	g.reloading.done(nil)
	g.budget = &pdflow.Budget{Bytes: cfg.gateway.bytesInFlight()}
	opts := []pdflow.Option{pdflow.WithMaxBody(cfg.gateway.MaxBodyBytes), pdflow.WithBudget(g.budget),
		pdflow.WithErrorHandler(writeError), pdflow.WithTelemetry(pdflow.Telemetry{Logger: log})}
	if tel.meters != nil {
		opts = append(opts, pdflow.WithTelemetry(pdflow.Telemetry{MeterProvider: tel.meters}))
	}
	var err error
	if g.mux, err = pdflow.NewMux(opts...); err != nil {
		return nil, err
	}
	other, err := g.passthrough(cfg.gateway)
	if err != nil {
		return nil, err
	}
	g.other.Store(other)
	g.list.Store(&[]*model{})
	g.modelSet = newModelSet(g)
	if cfg.gateway.ModelServers != nil {
		if g.modelSet.cluster, err = newCluster(log, cfg.gateway.ModelServers); err != nil {
			return nil, err
		}
	}
	return g, errors.Join(tel.observeModels(g.models), tel.observeKVEvents(g.models),
		tel.observeBytes(g.budget))
}

// models are those that are served now.
func (g *gateway) models() []*model { return *g.list.Load() }

// setModels replaces the models that are served. Until all are known, names that none of these has get 503.
func (g *gateway) setModels(models []*model, known bool) error {
	routes := make(map[string]pdflow.Server, len(models))
	for _, m := range models {
		routes[m.Model()] = m.flows.Server
	}
	if !known {
		routes["*"] = pdflow.NotYet // also in place of a model of the file: an object may have the name
	}
	g.routing.Lock()
	defer g.routing.Unlock()
	g.list.Store(&models)
	return g.mux.SetRoutes(routes)
}

// buildModel makes the flows of a ModelServer over one of the pools, which its model has now, or over a new pool.
func (g *gateway) buildModel(ms *modelServer, before []*pool) (*model, error) {
	engines, err := g.poolFor(ms, before)
	if err != nil {
		return nil, err
	}
	m := &model{modelServer: ms, pool: engines, recent: newRecent(ms.Model(), g.log)}
	cfg, main := g.cfg.Load(), ms.Main.Timeouts().Connect
	picker, err := m.admitting(g.tel, &cfg.recording)
	if err != nil {
		m.release()
		return nil, err
	}
	if m.admission == nil {
		m.recent.goodput = &goodput{log: g.log, model: ms.Model()}
	}
	opts := append(g.tel.options(), pdflow.WithBudget(g.budget),
		pdflow.WithForwardHeaders(cfg.gateway.ForwardHeaders...), pdflow.WithResponses(m.has),
		pdflow.WithObserver(m.pool.answers()), pdflow.WithObserver(m.recent.observer()),
		pdflow.WithTelemetry(pdflow.Telemetry{Logger: m.probes.log, GenAI: cfg.genAI, Usage: ms.Predicts(),
			Attributes: []attribute.KeyValue{attribute.String("gen_ai.request.model", ms.Model())}}))
	if serves := ms.Spec.Adapters.Serves(m.set); serves != nil {
		opts = append(opts, pdflow.WithAdapters(serves))
	}
	m.flows, err = ms.Flows(recentPicker{pick.NewAround(picker), m.recent}, &modelserver.FlowOptions{
		Transport: func(connect time.Duration) http.RoundTripper {
			if connect == main {
				return m.legs
			}
			return nil // connectors that differ have one of their own
		},
		NetHTTP: cfg.netHTTP,
		Options: opts,
	})
	if err != nil {
		m.release()
		return m, err
	}
	m.passing = m.pass(cfg.gateway.ForwardHeaders)
	return m, nil
}

// start starts the file's models, and the watch for changes, until ctx ends. wait returns when all of that has ended.
func (g *gateway) start(ctx context.Context) (wait func(), err error) {
	r := g.modelSet
	if err := r.apply(ctx, g.cfg.Load()); err != nil {
		r.cut()
		r.leaving.Wait()
		return nil, err
	}
	var running sync.WaitGroup
	running.Go(func() { r.run(ctx) })
	return func() {
		r.cut()
		done := make(chan struct{})
		go func() {
			defer close(done)
			running.Wait()
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
	}, nil
}

// start starts the connectors' listeners and, unless another model has, discovery and health probes, until end or ctx's
// end.
func (m *model) start(ctx context.Context, g *gateway) error {
	m.ctx, m.stop = context.WithCancel(ctx)
	err := errors.Join(m.flows.Start(m.ctx), m.pool.start(ctx))
	var prober *reuse.SyntheticProber
	var pairs *pick.Prober
	if err == nil {
		prober, err = g.syntheticProber(m)
	}
	if err == nil {
		pairs, err = m.pairProber(g)
	}
	if err != nil {
		m.stop()
		m.drain(m.ctx, g.log) // at once, since nobody has sent a request yet
		m.end()
		return err
	}
	m.parts.Go(func() {
		told := map[string]string{}
		for snap := range m.set.Changes(m.ctx) {
			told = m.tellUnfit(snap.Endpoints, told, m.probes.log)
		}
	})
	if m.inspected != nil {
		m.parts.Go(func() { m.followKV(g.tel.engines) })
	}
	if prober != nil {
		m.parts.Go(func() { ended(m.probes.log, "synthetic probe", prober.Run(m.ctx)) })
	}
	m.startAttestation(g)
	m.parts.Go(func() { ended(m.probes.log, "probes of pairs that ran out of time", pairs.Run(m.ctx)) })
	return nil
}

// tellUnfit logs, once for each, the engines that cannot be in a pair because their entries lack what a connector
// needs. told holds the reasons that were logged, by ID.
func (m *model) tellUnfit(endpoints []discovery.Endpoint, told map[string]string,
	log *slog.Logger) (now map[string]string) {
	now = map[string]string{}
	for _, flow := range m.flows.First() {
		for _, e := range endpoints {
			if err := kv.Of(flow.Connector()).CheckEndpoint(e); err != nil {
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
	m.parts.Wait()
	m.release()
}

func (m *model) release() {
	m.admission.release()
	m.decision.release()
	m.pool.release()
}

func ended(log *slog.Logger, what string, err error) {
	if err != nil {
		log.Error("ended", "part", what, "error", err)
	}
}

// drain refuses new requests from its first moment, waits for those in flight until ctx ends, then cuts them.
func (g *gateway) drain(ctx context.Context) {
	var wg sync.WaitGroup
	g.modelSet.halt() // from here on the models are those that they are
	select {
	case <-g.modelSet.halted:
		wg.Go(func() { g.modelSet.drained(ctx) })
	case <-ctx.Done(): // what leaves is cut at the end: see start
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

// find returns the model that serves a request, by the same rules as the mux. known is false if that is not known yet.
func (g *gateway) find(name string) (m *model, known bool) {
	g.routing.RLock()
	defer g.routing.RUnlock()
	server, _ := g.mux.Lookup(name)
	for _, m := range g.models() {
		if m.flows.Server == server {
			return m, true
		}
	}
	return nil, server != pdflow.NotYet
}
