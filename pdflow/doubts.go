// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"sync"
	"sync/atomic"
)

// doubts are the engines of a flow that have refused (4xx) each of the last requests they got. An engine's refusal is
// the client's fault, as a rule. But an engine that refuses everything, because its chat template is missing, say, or
// another model is loaded, is also idle, and gets nearly all requests from a picker that looks at loads. So after some
// refusals in a row the next request is sent to another engine, too. If that serves it, the refusals are the fault of
// the engine, until it serves again. If not, the engine is believed again: bodies that every engine refuses, whoever
// sends them, are seldom sent twice and harm no engine.
type doubts struct {
	n  atomic.Int32 // engines: 0 in the common case, and then no response takes the lock
	mu sync.Mutex
	of map[string]doubt // by ID
}

type doubt struct {
	row    int  // refusals in a row
	proven bool // another engine has served what this one refused
}

const (
	doubtAfter = 8    // refusals in a row
	doubtsMost = 1024 // engines that are remembered; engines come and go
)

// refused notes that an engine has refused a request, and reports whether the next engine is to be asked, and whether
// the refusal is this one's fault.
func (d *doubts) refused(id string) (ask, fault bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.of == nil || len(d.of) >= doubtsMost {
		d.of = map[string]doubt{}
	}
	x := d.of[id]
	x.row++
	d.of[id] = x
	d.n.Store(int32(len(d.of)))
	return x.row > doubtAfter || x.proven, x.proven
}

// settle notes whether another engine has served what these have refused.
func (d *doubts) settle(ids []string, served bool) {
	if len(ids) == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range ids {
		if x, ok := d.of[id]; ok {
			x.proven = served && (x.proven || x.row > doubtAfter)
			if !served {
				x.row = 0
			}
			d.of[id] = x
		}
	}
}

// served notes that an engine has served a leg.
func (d *doubts) served(id string) {
	if d.n.Load() == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.of, id)
	d.n.Store(int32(len(d.of)))
}
