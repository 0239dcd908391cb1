// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"sync"
	"time"
)

const (
	budgetSeconds = 10 // for which requests and retries are counted
	budgetFloor   = 3  // retries at a time that are always allowed, so that a flow with few requests retries too
)

// retryBudget bounds the retries of all requests of a flow to a share of these requests. Else an outage would double
// the load on the engines that are left.
type retryBudget struct {
	share float64
	born  time.Time

	mu       sync.Mutex
	counts   [budgetSeconds]budgetCount // a ring
	underWay int                        // retries that are under way, their pauses included
}

type budgetCount struct{ second, requests, retries int }

// now returns the count of this second. The caller holds the lock.
func (b *retryBudget) now() *budgetCount {
	second := int(time.Since(b.born) / time.Second)
	c := &b.counts[second%budgetSeconds]
	if c.second != second {
		*c = budgetCount{second: second}
	}
	return c
}

// request counts a request.
func (b *retryBudget) request() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now().requests++
}

// take reports whether one more retry is within the budget, and counts it. Then release must follow.
func (b *retryBudget) take() bool {
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

func (b *retryBudget) release() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.underWay--
}
