// SPDX-License-Identifier: Apache-2.0

package rawsocket

import (
	"math"
	"sync"
	"time"
)

// monitorEvery is how long the runtime's monitoring thread sleeps at most while there are sockets.
const monitorEvery = 20 * time.Millisecond

// monitor is a timer that runs while there are sockets, and does nothing. Raw system calls do not wake the runtime's
// monitoring thread. While it sleeps, a goroutine that computes, or one that always finds something to read, keeps all
// others from running, even on other processors, for as long as it goes on. But the thread wakes at each timer.
type monitor struct {
	mu    sync.Mutex
	open  int
	timer *time.Timer
}

// monitored is one for the whole process, as the thread is. Its timer is made here, since one that is made within a
// testing/synctest bubble would belong to that.
var monitored = newMonitor()

func newMonitor() *monitor {
	m := new(monitor)
	m.timer = time.AfterFunc(math.MaxInt64, m.tick)
	m.timer.Stop()
	return m
}

// add notes that n sockets have been opened, or closed if n is negative.
func (m *monitor) add(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.open
	m.open += n
	switch {
	case m.open == 0:
		m.timer.Stop()
	case before == 0:
		m.timer.Reset(monitorEvery)
	}
}

func (m *monitor) tick() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.open > 0 {
		m.timer.Reset(monitorEvery)
	}
}
