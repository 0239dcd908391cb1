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
	"github.com/pdkit/pdkit/discovery/inspect"
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
	waiting := gauge("pd.engine.requests.waiting", "{request}", "Requests in the engines' queues, as they say")
	usage := gauge("pd.engine.kv.usage", "1", "Share of its KV memory that the fullest engine uses")
	held := gauge("pd.engine.kv.held", "By", "KV that the engines' LMCache holds, in memory and on disk")
	prompt := counter("pd.engine.prompt.tokens", "{token}",
		"Prompt tokens, by where their KV came from: computed by the engine, or taken over")
	bytes := counter("pd.engine.kv.bytes", "By", "KV that engines have moved, as they count it")
	seconds := counter("pd.engine.kv.transfer.duration", "s", "Time that the moves of pd.engine.kv.bytes took")
	failed := counter("pd.engine.kv.failures", "{transfer}", "Moves of KV that failed, as the engines count them")
	expired := counter("pd.engine.kv.expired", "{request}", "Requests whose KV nobody read within the lease")
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
				r := attribute.String("pd.role", role)
				observe(running, s.running, r)
				observe(waiting, s.waiting, r)
				observe(usage, s.usage, r)
				observe(held, s.now.Memory, r, attribute.String("pd.medium", "memory"))
				observe(held, s.now.Disk, r, attribute.String("pd.medium", "disk"))
				observe(prompt, s.counted.Taken, r, attribute.String("pd.source", "taken"))
				observe(prompt, s.counted.Computed, r, attribute.String("pd.source", "computed"))
				observe(bytes, s.counted.Bytes, r)
				observe(seconds, s.counted.Seconds, r)
				observe(failed, s.counted.Failed, r)
				observe(expired, s.counted.Expired, r)
			}
		}
		totals.keep(all)
		return nil
	}, collapsing, endpoints, inFlight, running, waiting, usage, held, prompt, bytes, seconds, failed, expired)
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

// engineTotals adds up what engines count. An engine that was restarted begins at zero again, and one that leaves takes
// its counts along: the totals only rise.
type engineTotals struct {
	mu     sync.Mutex
	models map[string]*modelTotals
}

type modelTotals struct {
	last  map[string]inspect.KV // by engine
	roles map[string]*roleTotal
}

// roleTotal is what the engines of one role say together.
type roleTotal struct {
	running, waiting, usage float64
	now                     inspect.KV // Memory and Disk
	counted                 inspect.KV // since the gateway knows the engines
}

// of returns the totals of a model by role; nil if its engines are not asked.
func (t *engineTotals) of(m *model) map[string]roleTotal {
	if m.inspected == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.models[m.Model()]
	if all == nil {
		all = &modelTotals{roles: map[string]*roleTotal{}}
		t.models[m.Model()] = all
	}
	for _, r := range all.roles {
		*r = roleTotal{counted: r.counted}
	}
	last := make(map[string]inspect.KV, len(all.last))
	endpoints := m.set.Load().Endpoints
	for i := range endpoints {
		e := &endpoints[i]
		if reading, ok := m.inspected.Reading(e.ID); ok && !reading.Load.At.IsZero() {
			old, known := all.last[e.ID]
			all.add(e, &reading.Load, old, known)
			last[e.ID] = reading.Load.KV
		} else if old, known := all.last[e.ID]; known {
			last[e.ID] = old // it does not answer now
		}
	}
	all.last = last
	out := make(map[string]roleTotal, len(all.roles))
	for role, r := range all.roles {
		out[role] = *r
	}
	return out
}

// add adds one engine's word. What it had counted before the gateway first asked is not the gateway's to show.
func (t *modelTotals) add(e *discovery.Endpoint, load *inspect.Load, old inspect.KV, known bool) {
	r := t.roles[e.Role.String()]
	if r == nil {
		r = &roleTotal{}
		t.roles[e.Role.String()] = r
	}
	r.running += float64(load.Running)
	r.waiting += float64(load.Waiting)
	r.usage = max(r.usage, load.KVUsage)
	r.now.Memory += load.KV.Memory
	r.now.Disk += load.KV.Disk
	if !known {
		return
	}
	rise := func(total *float64, now, before float64) {
		if now < before { // restarted
			before = 0
		}
		*total += now - before
	}
	kv := &load.KV
	rise(&r.counted.Taken, kv.Taken, old.Taken)
	rise(&r.counted.Computed, kv.Computed, old.Computed)
	rise(&r.counted.Bytes, kv.Bytes, old.Bytes)
	rise(&r.counted.Seconds, kv.Seconds, old.Seconds)
	rise(&r.counted.Failed, kv.Failed, old.Failed)
	rise(&r.counted.Expired, kv.Expired, old.Expired)
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
