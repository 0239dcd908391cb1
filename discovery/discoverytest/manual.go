// SPDX-License-Identifier: Apache-2.0

package discoverytest

import (
	"context"
	"sync"

	"github.com/pdkit/pdkit/discovery"
)

// Manual is a source that a test drives. Any number of sets may watch it, and all methods may be called at any time,
// watched or not. Each watcher gets every list, one after the other.
type Manual struct {
	mu       sync.Mutex
	history  []discovery.Snapshot // the last one is current
	err      error                // what Watch calls return that are older than failures
	failures int
	changed  chan struct{} // closed at the next Publish or Fail
}

// NewManual returns a source that knows nothing yet: a Watch publishes nothing before the first Publish.
func NewManual() *Manual { return &Manual{changed: make(chan struct{})} }

// Publish replaces the source's list with endpoints. Without arguments the list is empty.
func (m *Manual) Publish(endpoints ...discovery.Endpoint) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.history = append(m.history, discovery.Snapshot{
		Version:   uint64(len(m.history)) + 1,
		Endpoints: append([]discovery.Endpoint(nil), endpoints...),
	})
	m.wake()
}

// Fail makes all running Watch calls return err, as if the source's backend had broken. A later Watch works.
func (m *Manual) Fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
	m.failures++
	m.wake()
}

func (m *Manual) wake() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// Watch publishes the current list, if there is one, and then each new one.
func (m *Manual) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	m.mu.Lock()
	next, failures := max(len(m.history)-1, 0), m.failures
	m.mu.Unlock()
	for {
		m.mu.Lock()
		news, changed := m.history[next:], m.changed
		failed, err := m.failures != failures, m.err
		m.mu.Unlock()
		for _, snap := range news {
			publish(snap)
		}
		next += len(news)
		if failed {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}
