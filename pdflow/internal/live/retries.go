// SPDX-License-Identifier: Apache-2.0

package live

import (
	"sync"
	"time"
)

const (
	budgetSeconds = 10 // for which requests and retries are counted
	budgetFloor   = 3  // retries at a time that are always allowed, so that a flow with few requests retries too
)

// Retries bounds the retries of all requests of a flow to a share of these requests. Else an outage would double
// the load on the engines that are left.
type Retries struct {
	share float64
	born  time.Time

	mu       sync.Mutex
	counts   [budgetSeconds]budgetCount // a ring
	underWay int                        // retries that are under way, their pauses included
}

// NewRetries bounds retries to a share of the requests.
func NewRetries(share float64) *Retries { return &Retries{share: share, born: time.Now()} }

type budgetCount struct{ second, requests, retries int }

// now returns the count of this second. The caller holds the lock.
func (b *Retries) now() *budgetCount {
	second := int(time.Since(b.born) / time.Second)
	c := &b.counts[second%budgetSeconds]
	if c.second != second {
		*c = budgetCount{second: second}
	}
	return c
}

// Request counts a request.
func (b *Retries) Request() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now().requests++
}

// Take reports whether one more retry is within the budget, and counts it. Then Give must follow.
func (b *Retries) Take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	requests, retries := 0, 0
	for _, c := range b.counts {
		if c.second > now.second-budgetSeconds {
			requests, retries = requests+c.requests, retries+c.retries
		}
	}
	if b.underWay >= budgetFloor && float64(retries) >= b.share*float64(requests) {
		return false
	}
	now.retries++
	b.underWay++
	return true
}

// Give ends a retry.
func (b *Retries) Give() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.underWay--
}
