// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/capacity"
)

const meterName = "github.com/pdkit/pdkit/cmd/gateway"

// phases are those of requests in flight. Each is always shown, so that a rule or an autoscaler sees a 0 and no gap.
var phases = []string{"pick", "prepare", "encode", "prefill", "event", "decode", "stream", "backoff"}

// observeModels shows how many engines a model has, what its requests do now, and what its engines say of themselves
// (-inspect). Engines come and go, so they are no label: their counts are added up by role.
func (t *telemetry) observeModels(models func() []*model) error {
	if t.meters == nil {
		return nil
	}
	m := t.meters.Meter(meterName)
	var errs []error
	gauge := func(name, unit, help string) metric.Float64ObservableGauge {
		g, err := m.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return g
	}
	counter := func(name, unit, help string) metric.Float64ObservableCounter {
		c, err := m.Float64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	endpoints := gauge("pd.endpoints", "{endpoint}", "Engines known, by role and phase")
	inFlight := gauge("pd.requests.in_flight", "{request}", "Requests in flight, by what they wait for")
	running := gauge("pd.engine.requests.running", "{request}", "Requests that the engines run, as they say")
	waiting := gauge("pd.engine.requests.waiting", "{request}",
		"Requests in the engines' queues, as they say, without those whose KV is on its way")
	usage := gauge("pd.engine.kv.usage", "1", "Share of its KV memory that the fullest engine uses")
	held := gauge("pd.engine.kv.held", "By", "KV that the engines' LMCache holds, in memory and on disk")
	prompt := counter("pd.engine.prompt.tokens", "{token}",
		"Prompt tokens, by where their KV came from: computed by the engine, or taken over")
	bytes := counter("pd.engine.kv.bytes", "By", "KV that engines have moved, as they count it")
	seconds := counter("pd.engine.kv.transfer.duration", "s", "Time that the moves of pd.engine.kv.bytes took")
	failed := counter("pd.engine.kv.failures", "{transfer}", "Moves of KV that failed, as the engines count them")
	expired := counter("pd.engine.kv.expired", "{request}", "Requests whose KV nobody read within the lease")
	throughput := gauge("pd.capacity.tokens", "{token}/s",
		"Prompt tokens that the engines compute and tokens that they make, in a second, over the last minute")
	backlog := gauge("pd.capacity.backlog", "{token}", "Tokens of the requests that wait in the engines")
	saturation := gauge("pd.capacity.saturation", "1",
		"The engines' throughput as a share of what they can do, or their mean KV usage if that is more")
	wanted := gauge("pd.capacity.engines.wanted", "{endpoint}",
		"Engines that the load needs: the tokens that come and wait, and the KV. It falls after 10 minutes only")
	collapsing := gauge("pd.goodput.collapsing", "{model}", "1 where admission is off and a quarter of the attempts "+
		"of the last 10 s came too late: they ran out of time, or their clients gave up; else 0")
	totals := t.engines
	_, err := m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		all := models()
		for _, m := range all {
			model := attribute.String("gen_ai.request.model", m.Model())
			observe := func(i metric.Float64Observable, v float64, more ...attribute.KeyValue) {
				o.ObserveFloat64(i, v, metric.WithAttributes(append(more, model)...))
			}
			if g := m.recent.goodput; g != nil {
				low := 0.0
				if g.collapses(time.Now()) {
					low = 1
				}
				observe(collapsing, low)
			}
			for k, n := range m.known() {
				observe(endpoints, n, attribute.String("pd.role", k.role), attribute.String("pd.phase", k.phase))
			}
			doing := m.doing()
			for _, phase := range phases {
				observe(inFlight, doing[phase], attribute.String("pd.phase", phase))
			}
			for role, s := range totals.of(m) {
				r := attribute.String("pd.role", role.String())
				observe(running, float64(s.Running), r)
				observe(waiting, float64(s.Waiting), r)
				observe(usage, s.KVUsage, r)
				observe(held, s.Held.Memory, r, attribute.String("pd.medium", "memory"))
				observe(held, s.Held.Disk, r, attribute.String("pd.medium", "disk"))
				observe(prompt, s.Counted.Taken, r, attribute.String("pd.source", "taken"))
				observe(prompt, s.Counted.Computed, r, attribute.String("pd.source", "computed"))
				observe(bytes, s.Counted.Bytes, r)
				observe(seconds, s.Counted.Seconds, r)
				observe(failed, s.Counted.Failed, r)
				observe(expired, s.Counted.Expired, r)
				observe(throughput, s.Throughput, r)
				observe(backlog, s.Backlog, r)
				observe(saturation, s.Saturation, r)
				observe(wanted, float64(s.Wanted), r)
			}
		}
		totals.keep(all)
		return nil
	}, collapsing, endpoints, inFlight, running, waiting, usage, held, prompt, bytes, seconds, failed, expired,
		throughput, backlog, saturation, wanted)
	return errors.Join(append(errs, err)...)
}

type engineKind struct{ role, phase string }

// known counts the model's engines.
func (m *model) known() map[engineKind]float64 {
	n := map[engineKind]float64{}
	for _, e := range m.set.Load().Endpoints {
		n[engineKind{e.Role.String(), e.Phase.String()}]++
	}
	return n
}

// doing counts the model's requests in flight by phase.
func (m *model) doing() map[string]float64 {
	n := map[string]float64{}
	for _, f := range m.flows.All() {
		for _, s := range f.Sessions() {
			n[s.Phase]++
		}
	}
	return n
}

// engineTotals measures the engines of each model.
type engineTotals struct {
	mu     sync.Mutex
	models map[string]*capacity.Meter
}

// of returns what a model's engines say together, by role; nil if they are not asked.
func (t *engineTotals) of(m *model) map[discovery.Role]capacity.Role {
	if m.inspected == nil {
		return nil
	}
	t.mu.Lock()
	meter := t.models[m.Model()]
	if meter == nil {
		meter = capacity.New(nil)
		t.models[m.Model()] = meter
	}
	t.mu.Unlock()
	return meter.Observe(time.Now(), m.set.Load().Endpoints, m.inspected.Reading)
}

// keep forgets models that are served no more.
func (t *engineTotals) keep(models []*model) {
	t.mu.Lock()
	defer t.mu.Unlock()
	served := make(map[string]bool, len(models))
	for _, m := range models {
		served[m.Model()] = true
	}
	for name := range t.models {
		if !served[name] {
			delete(t.models, name)
		}
	}
}
