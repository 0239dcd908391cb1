// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"sync"
)

// probeBook remembers what the health probes of one model found, for the log and for operators. Endpoints that have
// always answered are not in it.
type probeBook struct {
	log    *slog.Logger
	mu     sync.Mutex
	failed map[string]probe
}

type probe struct {
	healthy bool
	failure string // the last failed probe
}

// observe is told of failed probes, and of the good one that ends a failure.
func (b *probeBook) observe(id string, healthy bool, err error) {
	b.mu.Lock()
	if b.failed == nil {
		b.failed = map[string]probe{}
	}
	was, known := b.failed[id]
	now := probe{healthy: healthy, failure: was.failure}
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

func (b *probeBook) of(id string) probe {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p, ok := b.failed[id]; ok {
		return p
	}
	return probe{healthy: true}
}
