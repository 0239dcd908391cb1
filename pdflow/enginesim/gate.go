// SPDX-License-Identifier: Apache-2.0

package enginesim

import "sync"

// gate holds back whoever passes while it is shut.
type gate struct {
	mu    sync.Mutex
	open  chan struct{} // closed while the gate is open
	ended chan struct{}
	once  sync.Once
}

func (g *gate) init() {
	g.open, g.ended = make(chan struct{}), make(chan struct{})
	close(g.open)
}

func (g *gate) set(shut bool) {
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

// shut says whether the gate is shut now.
func (g *gate) shut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
		return false
	default:
		return true
	}
}

// pass waits until the gate is open; false when it has ended.
func (g *gate) pass() bool {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
		return true
	case <-g.ended:
		return false
	}
}

// end lets everybody go for good.
func (g *gate) end() { g.once.Do(func() { close(g.ended) }) }
