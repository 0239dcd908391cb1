// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// probeBook remembers what the health probes of one model found, for the log and for operators. Endpoints that have
// always answered are not in it.
type probeBook struct {
	log    *slog.Logger
	mu     sync.Mutex
	failed map[string]verdict
}

type verdict struct {
	healthy bool
	failure string    // the last failed probe
	since   time.Time // it is not healthy
	url     string    // of the engine, "" until a snapshot with the verdict is there
}

// observe is told of failed probes, and of the good one that ends a failure.
func (b *probeBook) observe(id string, healthy bool, err error) {
	b.mu.Lock()
	if b.failed == nil {
		b.failed = map[string]verdict{}
	}
	was, known := b.failed[id]
	now := verdict{healthy: healthy, failure: was.failure, since: was.since, url: was.url}
	if !healthy && (!known || was.healthy) {
		now.since = time.Now().UTC()
	}
	if err != nil {
		now.failure = err.Error()
	}
	b.failed[id] = now
	b.mu.Unlock()
	switch {
	case !healthy && (!known || was.healthy):
		b.log.Warn("engine is not ready", "endpoint", id, "error", err)
	case healthy && known && !was.healthy:
		b.log.Info("engine is ready again", "endpoint", id)
	}
}

// keep forgets engines that have left, or given their ID to another one.
func (b *probeBook) keep(endpoints []discovery.Endpoint) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.failed) == 0 {
		return
	}
	kept := map[string]verdict{}
	for i := range endpoints {
		v, known := b.failed[endpoints[i].ID]
		if url := endpoints[i].URL.String(); known && (v.url == "" || v.url == url) {
			v.url = url
			kept[endpoints[i].ID] = v
		}
	}
	b.failed = kept
}

// ill returns the URLs of engines that do not answer, by ID.
func (b *probeBook) ill() map[string]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	ill := map[string]string{}
	for id, v := range b.failed {
		if !v.healthy {
			ill[id] = v.url
		}
	}
	return ill
}

func (b *probeBook) of(id string) verdict {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p, ok := b.failed[id]; ok {
		return p
	}
	return verdict{healthy: true}
}
