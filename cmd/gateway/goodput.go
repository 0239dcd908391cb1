// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"sync"
	"time"

	"github.com/pdkit/pdkit/pdflow"
)

const (
	goodputSeconds = 10          // that are looked at
	goodputFewest  = 20          // attempts in that time; fewer say nothing
	goodputShare   = 4           // 1/4 of them came too late: what an overload of 1.2 times the capacity makes
	goodputAgain   = time.Minute // from one line of the log to the next, while it goes on
	gaveUpAfter    = time.Second // a client that leaves after so long without a byte did not want to wait any more
)

// goodput sees that the attempts of a model without admission come too late: they run out of time, or their clients
// leave while they wait for the first byte, or sooner after it than they had waited for it. If more requests come than
// engines can serve, each request waits until it is too late, and in the end hardly one is served
// (docs/reliability/overload.md). A nil goodput sees nothing.
type goodput struct {
	log   *slog.Logger
	model string

	mu      sync.Mutex
	seconds [goodputSeconds]endings // a ring
	low     bool
	told    time.Time
}

// endings are how the attempts of one second ended.
type endings struct {
	second            int64 // Unix
	served, late, all int
}

// add counts an attempt that has ended.
func (g *goodput) add(o *pdflow.Outcome, now time.Time) {
	if g == nil {
		return
	}
	late := false
	if e := o.Err; e != nil {
		begun := o.Decode.FirstByte
		if begun.IsZero() {
			begun = now
		}
		waited, read := begun.Sub(o.Session.CreatedAt), now.Sub(begun)
		// Where engines serve in the order of arrival, each request begins just before its client gives up.
		late = e.Code == pdflow.CodeTimeout || e.Code == pdflow.CodeClientGone && waited >= gaveUpAfter && read < waited
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &g.seconds[now.Unix()%goodputSeconds]
	if s.second != now.Unix() {
		g.tell(now)
		*s = endings{second: now.Unix()}
	}
	s.all++
	if o.Err == nil {
		s.served++
	}
	if late {
		s.late++
	}
}

// tell writes to the log when goodput begins to collapse, while it goes on, and when it is over.
func (g *goodput) tell(now time.Time) {
	sum, low := g.sum(now)
	before := g.low
	g.low = low
	switch {
	case low && (!before || now.Sub(g.told) >= goodputAgain):
		g.told = now
		g.log.Warn("goodput collapses: admission is off", "model", g.model,
			"served_per_second", float64(sum.served)/goodputSeconds,
			"late_per_second", float64(sum.late)/goodputSeconds,
			"remedy", "spec.admission: {mode: adaptive}, see docs/reliability/overload.md; if one engine hangs, "+
				"take it out")
	case before && !low:
		g.log.Info("goodput has recovered", "model", g.model, "served_per_second", float64(sum.served)/goodputSeconds)
	}
}

// sum adds up the last seconds, and says whether goodput collapses. The caller holds g.mu.
func (g *goodput) sum(now time.Time) (sum endings, low bool) {
	for _, s := range g.seconds {
		if now.Unix()-s.second <= goodputSeconds {
			sum.served, sum.late, sum.all = sum.served+s.served, sum.late+s.late, sum.all+s.all
		}
	}
	return sum, sum.all >= goodputFewest && sum.late*goodputShare >= sum.all
}

// collapses reports whether goodput collapses now.
func (g *goodput) collapses(now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, low := g.sum(now)
	return low
}
