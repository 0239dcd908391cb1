// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kvevents"
	"github.com/pdkit/pdkit/pdflow/kvindex"
	"github.com/pdkit/pdkit/pdflow/modelserver"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/prompttokens"
)

// kvEvents are what is known of a model's engines by their KV-cache events.
type kvEvents struct {
	index  *kvindex.Index
	reader *kvevents.Subscriber
	tokens *prompttokens.Client // nil: nobody is asked for a prompt's tokens

	log *slog.Logger
	mu  sync.Mutex
	ill map[kvevents.Source]string // why a stream is broken, as it was logged
}

// newKVEvents makes the subscriptions of a model. They begin with run. With loads, engines' load streams are read, too.
func newKVEvents(spec modelserver.KVEvents, model string, loads bool, set *discovery.Set, client http.RoundTripper,
	log *slog.Logger) (*kvEvents, error) {
	if !spec.Mode.On() {
		return nil, nil //nolint:nilnil // there are none, and that is no fault
	}
	k := &kvEvents{index: kvindex.New(), log: log, ill: map[kvevents.Source]string{}}
	o := &kvevents.Options{Model: model, Listen: spec.Listen, ListenRanks: spec.Ranks, Loads: loads, Poll: client,
		Observe: k.observe}
	if spec.Mode == modelserver.KVEventsAsk {
		o.Client = client
	}
	if spec.Tokens == "engines" {
		k.tokens = prompttokens.New(set, &prompttokens.Options{Client: client,
			Timeout: time.Duration(spec.TokensTimeout)})
	}
	var err error
	k.reader, err = kvevents.New(k.index.Sink(), o)
	return k, err
}

// policy chooses the engines that hold most of a prompt. Where nobody is asked for a prompt's tokens, it knows those of
// requests that give them.
func (k *kvEvents) policy(model string, adapter func(string) bool) pick.Policy {
	tokens := k.tokens
	if tokens == nil {
		tokens = prompttokens.New(discovery.NewSet(), nil)
	}
	if model == "" {
		adapter = nil // the request's name is that of a model
	}
	return pick.KV(pick.KVOptions{Index: k.index, Tokens: tokens, Model: model, Adapter: adapter})
}

// run follows the engines until ctx ends. An address that is in use is tried again, since the pool that this one takes
// the place of may have it yet.
func (k *kvEvents) run(ctx context.Context, set *discovery.Set) {
	const again = time.Second
	for told := false; ; told = true {
		err := k.reader.Run(ctx, set)
		if err == nil {
			return
		}
		if told {
			k.log.Debug("KV-cache events", "error", err)
		} else {
			k.log.Warn("KV-cache events: spec.kvEvents.listen cannot be opened; it is tried again", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(again):
		}
	}
}

// observe logs a stream's trouble once, and its end.
func (k *kvEvents) observe(src kvevents.Source, err error) {
	var e *kvevents.Error
	if errors.As(err, &e) && e.Op == "load" {
		k.log.Warn("an engine's load stream broke: its metrics count until it comes again", "endpoint", src.Engine,
			"rank", src.Rank, "error", err.Error())
		return
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	k.mu.Lock()
	before := k.ill[src]
	if text == "" {
		delete(k.ill, src)
	} else {
		k.ill[src] = text
	}
	k.mu.Unlock()
	switch {
	case text == before:
	case text != "":
		k.log.Warn("KV-cache events", "endpoint", src.Engine, "rank", src.Rank, "error", text)
	default:
		k.log.Info("KV-cache events come again", "endpoint", src.Engine, "rank", src.Rank)
	}
}

// word says in a word what is known of an engine's KV; "" if nobody follows it.
func (k *kvEvents) word(engine string) string {
	if k == nil {
		return ""
	}
	return stateWords[k.index.State(engine).State]
}

var stateWords = map[kvindex.State]string{kvindex.Exact: "exact", kvindex.Incomplete: "incomplete",
	kvindex.Unknown: "unknown"}

// observeKVEvents shows how much of the engines' KV is known, and how the streams go.
func (t *telemetry) observeKVEvents(models func() []*model) error {
	if t.meters == nil {
		return nil
	}
	m := t.meters.Meter(meterName)
	var errs []error
	counter := func(name, unit, help string) metric.Int64ObservableCounter {
		c, err := m.Int64ObservableCounter(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	engines, err := m.Int64ObservableGauge("pd.kv_events.engines", metric.WithUnit("{endpoint}"),
		metric.WithDescription("Engines, by how much of their KV is known from their events"))
	errs = append(errs, err)
	lag, err := m.Float64ObservableGauge("pd.kv_events.lag", metric.WithUnit("s"),
		metric.WithDescription("How much later than usual the last batch of the slowest engine came"))
	errs = append(errs, err)
	batches := counter("pd.kv_events.batches", "{batch}", "Batches of KV-cache events that were read")
	lost := counter("pd.kv_events.connections.lost", "{connection}", "Streams of KV-cache events that broke")
	replays := counter("pd.kv_events.replays", "{replay}", "Replays of KV-cache events, by how they ended")
	tokens := counter("pd.kv_events.prompts", "{request}", "Prompts whose tokens were wanted before the pick: "+
		"known already, told by an engine, or not")
	_, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		for _, m := range models() {
			k := m.kv
			if k == nil {
				continue
			}
			model := attribute.String("gen_ai.request.model", m.Model())
			with := func(key, value string) metric.MeasurementOption {
				return metric.WithAttributes(model, attribute.String(key, value))
			}
			n := map[string]int64{}
			worst := 0.0
			for _, e := range m.set.Load().Endpoints {
				status := k.index.State(e.ID)
				n[stateWords[status.State]]++
				worst = max(worst, status.Lag.Seconds())
			}
			for _, word := range stateWords {
				o.ObserveInt64(engines, n[word], with("pd.state", word))
			}
			o.ObserveFloat64(lag, worst, metric.WithAttributes(model))
			c := k.reader.Counts()
			o.ObserveInt64(batches, c.Batches, metric.WithAttributes(model))
			o.ObserveInt64(lost, c.Lost, metric.WithAttributes(model))
			o.ObserveInt64(replays, c.Replays, with("pd.outcome", "whole"))
			o.ObserveInt64(replays, c.Failed, with("pd.outcome", "failed"))
			if k.tokens != nil {
				p := k.tokens.Counts()
				o.ObserveInt64(tokens, p.Hits, with("pd.outcome", "known"))
				o.ObserveInt64(tokens, p.Asked-p.Failed, with("pd.outcome", "told"))
				o.ObserveInt64(tokens, p.Failed, with("pd.outcome", "failed"))
			}
		}
		return nil
	}, engines, lag, batches, lost, replays, tokens)
	return errors.Join(append(errs, err)...)
}
