// SPDX-License-Identifier: Apache-2.0

package core

import "sync"

// Gate holds back whoever passes while it is shut.
type Gate struct {
	mu    sync.Mutex
	open  chan struct{} // closed while the gate is open
	Ended chan struct{}
	once  sync.Once
}

// Init makes the gate, open.
func (g *Gate) Init() {
	g.open, g.Ended = make(chan struct{}), make(chan struct{})
	close(g.open)
}

// Set shuts the gate or opens it.
func (g *Gate) Set(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
		if shut {
			g.open = make(chan struct{})
		}
	default:
		if !shut {
			close(g.open)
		}
	}
}

// Shut reports whether the gate is shut now.
func (g *Gate) Shut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
		return false
	default:
		return true
	}
}

// Pass waits until the gate is open; false when it has ended.
func (g *Gate) Pass() bool {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
		return true
	case <-g.Ended:
		return false
	}
}

// End lets everybody go for good.
func (g *Gate) End() { g.once.Do(func() { close(g.Ended) }) }
