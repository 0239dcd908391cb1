// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"runtime"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// picker is what one flow asks: the flow's rules, and the table that is made with them. Which engines form a pair
// depends on the rules. All else is the state's, which all pickers that were bound from one share. The state does not
// know its pickers, so that a flow that is gone leaves none behind.
type picker struct {
	*state
	pairing *pairing
	latest  *latest
}

// latest is a picker's table of the latest snapshot that it has loaded. It is no part of the picker, because the
// cleanup of the picker needs it.
type latest struct {
	table    atomic.Pointer[table] // nil before the first pick
	building atomic.Bool
}

// Bind returns a picker with a connector's rules that shares all else with this one.
func (p *picker) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	return p.bind(newPairing(c, serving, p.opts))
}

func (s *state) bind(rules *pairing) *picker {
	p := &picker{state: s, pairing: rules, latest: &latest{}}
	if s.policy.needs.loads {
		// Engines' loads are counted in the lists of the table, until the table leaves. If nobody holds the picker any
		// more, its last table leaves, too. That takes a collection of garbage, and does no harm before.
		runtime.AddCleanup(p, func(l *latest) {
			if t := l.table.Load(); t != nil {
				t.leave()
			}
		}, p.latest)
	}
	return p
}

// besideAbove is a number of endpoints. A table for more of them takes longer to make than a pick may last, so it is
// made in a goroutine of its own.
const besideAbove = 256

// load returns the table of the latest snapshot. While a large table is being made, it returns the previous one.
func (p *picker) load() *table {
	snap, t := p.set.Load(), p.latest.table.Load()
	switch {
	case t == nil:
		return p.rebuild()
	case t.snap == snap:
		return t
	case len(snap.Endpoints) <= besideAbove:
		return p.rebuild()
	}
	if p.latest.building.CompareAndSwap(false, true) {
		go func() {
			defer p.latest.building.Store(false)
			p.rebuild()
		}()
	}
	return t
}

// rebuild returns the table of the latest snapshot, which it makes if there is none yet.
func (p *picker) rebuild() *table {
	p.mu.Lock()
	defer p.mu.Unlock()
	snap, old := p.set.Load(), p.latest.table.Load()
	if old != nil && old.snap == snap {
		return old
	}
	p.follow(snap)
	t := newTable(snap, old, p.state, p.pairing)
	// While both tables are in use, loads are counted in both. Otherwise picks with one table would not see the load
	// that picks with the other one cause.
	if p.policy.needs.loads {
		t.join()
	}
	if p.latest.table.Store(t); old != nil {
		old.leave()
	}
	runtime.KeepAlive(p) // the cleanup comes after the last table
	return t
}

// follow takes a snapshot over for all pickers that share the state. The caller holds the lock.
func (s *state) follow(snap *discovery.Snapshot) {
	if s.snap == snap {
		return
	}
	if s.snap != nil {
		s.cooldowns.follow(s.snap, snap)
	}
	s.cooldowns.count(snap)
	if s.snap = snap; s.policy.needs.loads {
		s.known.follow(snap)
	}
}
