// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// An engine that has refused a model's name is not picked for that model for a while if there are others. It may load
// the model, or the adapter, at any time: discovery/inspect tells that sooner, if it is there.
const (
	missingFor  = 10 * time.Second
	missingMost = 256 // models: clients name what they like
	missingName = 512 // bytes of a name; a longer one is not remembered
)

// missing remembers which engines do not have a model, for all pickers of one New.
type missing struct {
	n  atomic.Int64 // models: 0 in the common case, and then no pick takes the lock
	mu sync.RWMutex
	// By model and engine: until when it is remembered that the engine lacks the model; zero: the engine has served it
	// while others lacked it.
	m map[string]map[string]time.Time
}

// add notes that an engine does not have a model. If it had it, much may have changed, and the others are asked again.
func (m *missing) add(engine, model string) {
	if len(model) > missingName {
		return
	}
	model = strings.Clone(model) // else the client's whole body would be kept
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.m == nil {
		m.m = map[string]map[string]time.Time{}
	}
	if m.m[model] == nil {
		m.makeRoom(now)
		m.m[model] = map[string]time.Time{}
	}
	if until, known := m.m[model][engine]; known && until.IsZero() {
		clear(m.m[model])
	}
	m.m[model][engine] = now.Add(missingFor)
	m.n.Store(int64(len(m.m)))
}

// makeRoom forgets what is over, and any model if there are too many all the same: a flood of names has the same chance
// to go as the names that count.
func (m *missing) makeRoom(now time.Time) {
	for model, engines := range m.m {
		maps.DeleteFunc(engines, func(_ string, until time.Time) bool { return now.After(until) })
		if len(engines) == 0 {
			delete(m.m, model)
		}
	}
	for model := range m.m {
		if len(m.m) < missingMost {
			return
		}
		delete(m.m, model)
	}
}

// served notes that an engine has a model.
func (m *missing) served(model string, engines ...string) {
	if m.n.Load() == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range engines {
		if m.m[model] != nil && id != "" {
			m.m[model][id] = time.Time{}
		}
	}
}

// engines returns those that do not have a model, nil if none is known to lack it.
func (m *missing) engines(model string) map[string]bool {
	if m.n.Load() == 0 || model == "" {
		return nil
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	var all map[string]bool
	now := time.Now()
	for id, until := range m.m[model] {
		if now.Before(until) {
			if all == nil {
				all = map[string]bool{}
			}
			all[id] = true
		}
	}
	return all
}
