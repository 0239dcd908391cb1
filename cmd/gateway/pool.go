// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/discovery/registration"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/attest"
	"github.com/pdkit/pdkit/pdflow/health"
	"github.com/pdkit/pdkit/pdflow/modelserver"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/responses"
	"github.com/pdkit/pdkit/transport"
)

// pool is the engines of a model: what finds them, what is known of each, and the connections to them. A model whose
// ModelServer changes keeps its pool, with the loads and prefixes that the picker knows, unless the change is about
// the engines themselves.
type pool struct {
	key      string
	model    string
	log      *slog.Logger
	listed   *listing // nil unless the engines are a static list
	set      *discovery.Set
	choosing pdflow.Picker    // what picker is around
	has      *responses.Index // which engine has which response
	picker   *attest.Quarantine
	prober   *health.Prober
	kv       *kvEvents // nil: nobody subscribes to the engines' events
	probes   probeBook
	legs     *transport.Transport // of the main flow, and below asking
	asking   *asking

	announced   *announced      // nil unless engines announce themselves
	inspected   *inspect.Source // nil unless engines are asked
	admission   *admission      // of the model that is served; nil: it has none
	decision    *decision       // likewise
	attestation *attestation    // likewise

	users atomic.Int64    // models
	life  context.Context // from start, which may be called again, to the last release
	stop  context.CancelFunc
	parts sync.WaitGroup
}

// announced is the source of engines that announce themselves. Pools share it if they follow each other, since two
// sources cannot listen at one address.
type announced struct {
	*registration.Source
	at    modelserver.Registration
	users atomic.Int64 // pools
}

// adaptersEvery is how often engines are asked which adapters they have loaded.
const adaptersEvery = 5 * time.Second

// poolKey tells which ModelServers can have the same pool: it holds all that newPool reads, but a static list, which
// may change.
func poolKey(ms *modelServer) string {
	limits := ms.Main.Timeouts()
	found := ms.Spec.Discovery
	found.Static = modelserver.Static{}
	var adapters any = ms.Spec.Adapters.Auto()
	if ms.Spec.KVEvents.Mode.On() { // policy kv looks prompts up by their names
		adapters = ms.Spec.Adapters
	}
	key, err := json.Marshal([]any{ms.Model(), ms.ServedModel(), ms.Namespace, ms.owner != nil, found, ms.FoundBy,
		ms.Spec.WorkloadSelector, ms.Spec.WorkloadPort, limits.Connect, limits.HealthCheck, ms.Spec.TLS,
		ms.AdmitOptions() != nil, ms.Decides(), adapters, ms.Spec.KVEvents})
	if err != nil { // JSON that has been read can be written
		panic(err)
	}
	return string(key)
}

// poolFor returns that one of the pools which suits a model, or a new pool. It does not dial and does not listen.
// release must follow.
func (g *gateway) poolFor(ms *modelServer, before []*pool) (*pool, error) {
	for _, p := range before {
		if p.key == poolKey(ms) {
			p.users.Add(1)
			return p, nil
		}
	}
	cfg := g.cfg.Load()
	p := &pool{key: poolKey(ms), model: ms.Model(), log: g.log}
	for _, other := range before { // what corrupts KV does so over other connections, too
		p.attestation = cmp.Or(p.attestation, other.attestation)
	}
	p.probes.log = g.log.With("model", ms.Model())
	source, err := ms.source(cfg, func(err error) { p.probes.log.Warn("discovery", "error", err) })
	if err != nil {
		return nil, err
	}
	limits := ms.Main.Timeouts()
	if p.legs, err = ms.NewTransport(limits.Connect, cfg.netHTTP); err != nil {
		return nil, err
	}
	p.asking = newAsking(p.legs, cfg.engineKey, p.probes.log)
	p.listed, _ = source.(*listing)
	if own, ok := source.(*registration.Source); ok {
		p.announced = &announced{Source: own, at: ms.Spec.Discovery.Registration}
		for _, other := range before {
			if a := other.announced; a != nil && a.at == p.announced.at {
				p.announced, source = a, a.Source
			}
		}
		p.announced.users.Add(1)
	}
	o := &inspect.Options{Ask: inspect.All, Interval: cfg.inspect, Client: p.asking}
	if served := ms.ServedModel(); served != "*" {
		o.Model = served
	}
	switch follow := ms.Spec.Adapters.Auto(); {
	case cfg.inspect > 0:
		if follow {
			o.LoadInterval = min(cfg.inspect, adaptersEvery)
		} else {
			o.Ask &^= inspect.Adapters
		}
		if ms.AdmitOptions() != nil || ms.Decides() {
			o.LoadInterval = time.Second
		}
		p.inspected = inspect.Wrap(source, o)
		source = p.inspected
	case follow:
		o.Ask, o.Interval = inspect.Adapters, adaptersEvery
		source = inspect.Wrap(source, o)
	}
	p.set = discovery.NewSet(source)
	p.has = responses.New(p.set, p.legs)
	if p.kv, err = newKVEvents(ms.Spec.KVEvents, ms.asked(), p.inspected != nil, p.set, p.asking,
		p.probes.log); err != nil {
		return nil, fmt.Errorf("spec.kvEvents: %w", err)
	}
	var choosing []pick.Option
	if every := cmp.Or(o.LoadInterval, o.Interval); p.inspected != nil && every <= loadEveryMost {
		load := func(id string) inspect.Load { return p.fresh(id, 3*every) }
		choosing = append(choosing, pick.WithLoad(load))
	}
	if ms.Decides() {
		choosing = append(choosing, pick.WithCandidates())
	}
	policy := cfg.pick
	if cfg.pickKV && p.kv != nil {
		policy = p.kv.policy(ms.asked(), ms.Spec.Adapters.Serves(p.set))
	}
	p.choosing = pick.New(p.set, policy, choosing...)
	p.picker = attest.NewQuarantine(p.choosing)
	for _, other := range slices.Backward(before) { // the first one serves the model now
		p.picker.Adopt(other.picker)
	}
	timeout := limits.HealthCheck
	if timeout == config.None {
		timeout = time.Hour // the prober knows no probe without an end
	}
	p.prober = health.New(p.set, &health.Options{Timeout: timeout, Client: p.asking, Observe: p.probes.observe})
	p.users.Add(1)
	return p, nil
}

// loadEveryMost is how seldom engines may say how busy they are so that pickers go by it. What they said longer ago
// would send all gateways to the same engine.
const loadEveryMost = 5 * time.Second

// fresh is load without what is older than that where the engine was asked for it.
func (p *pool) fresh(id string, old time.Duration) inspect.Load {
	r, _ := p.inspected.Reading(id)
	if time.Since(r.Load.At) > old {
		r.Load = inspect.Load{}
	}
	if p.kv == nil {
		return r.Load
	}
	return p.kv.reader.Load(id, r.Load)
}

// load is what an engine has said of its load, by which pickers go. Limits and capacity learn from what it responds
// when it is asked.
func (p *pool) load(id string) inspect.Load { return p.fresh(id, math.MaxInt64) }

// start starts discovery and health probes, until the last user's release or ctx's end. Of several users the first
// starts them.
func (p *pool) start(ctx context.Context) error {
	if p.life != nil {
		return nil
	}
	p.life, p.stop = context.WithCancel(ctx)
	if err := p.startRegistration(ctx); err != nil {
		return err
	}
	p.set.OnError(func(err error) { p.probes.log.Warn("discovery", "error", err) })
	p.parts.Go(func() { ended(p.probes.log, "discovery", p.set.Run(p.life)) })
	p.parts.Go(func() { ended(p.probes.log, "health", p.prober.Run(p.life)) })
	if p.kv != nil {
		p.parts.Go(func() { p.kv.run(p.life, p.set) })
	}
	p.parts.Go(func() {
		for snap := range p.set.Changes(p.life) {
			p.probes.keep(snap.Endpoints)
		}
	})
	if p.listed != nil { // a list that the file has is served from the first request on
		ctx, stop := context.WithTimeout(p.life, time.Second)
		defer stop()
		_ = p.set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return s.Version > 0 })
	}
	return nil
}

// answers tells the prober which engines serve.
func (p *pool) answers() pdflow.Observer {
	return pdflow.Observer{LegEnd: func(_ context.Context, _ *connector.Session, o *pdflow.LegOutcome,
		_ *connector.PrefillResult) {
		if o.Err == nil {
			p.prober.Answered(o.Endpoint)
		}
	}}
}

// release ends what start has started, after the last user.
func (p *pool) release() {
	if p.users.Add(-1) > 0 {
		return
	}
	if p.stop != nil {
		p.stop()
	}
	if p.announced != nil && p.announced.users.Add(-1) == 0 {
		_ = p.announced.Close() // never fails
	}
	p.parts.Wait()
	p.legs.CloseIdleConnections()
	time.AfterFunc(afterlife, func() { _ = p.legs.Close() }) // never fails
}

// startRegistration opens the listeners at which engines announce themselves, where the model has any.
func (p *pool) startRegistration(ctx context.Context) error {
	s := p.announced
	if s == nil || s.users.Load() > 1 { // another pool has started it
		return nil
	}
	if err := s.Start(ctx); err != nil {
		return fmt.Errorf("spec.discovery.registration: %w", err)
	}
	var addresses []any
	if addr := s.Addr(); addr != "" {
		addresses = append(addresses, "listen", addr)
	}
	if addr := s.HTTPAddr(); addr != "" {
		addresses = append(addresses, "http", addr)
	}
	p.log.Info("engines may announce themselves", append(addresses, "model", p.model)...)
	return nil
}

// listing is the source of a static list, which a reload of the configuration may replace.
type listing struct {
	mu       sync.Mutex
	engines  []discovery.Endpoint
	replaced chan struct{} // closed by the next replace
}

func newListing(engines []discovery.Endpoint) *listing {
	return &listing{engines: engines, replaced: make(chan struct{})}
}

func (l *listing) replace(engines []discovery.Endpoint) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.engines = engines
	close(l.replaced)
	l.replaced = make(chan struct{})
}

// Watch publishes the list, and each that replaces it.
func (l *listing) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	for version := uint64(1); ; version++ {
		l.mu.Lock()
		engines, replaced := l.engines, l.replaced
		l.mu.Unlock()
		publish(discovery.Snapshot{Version: version, Endpoints: engines})
		select {
		case <-ctx.Done():
			return nil
		case <-replaced:
		}
	}
}
