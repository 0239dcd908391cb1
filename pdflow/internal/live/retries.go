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
// the load on the engines that are left. What engines answer, and how long they take, may be the doing of one client,
// whose bodies draw it: so retries after an answer, and second prefills, leave a quarter of the share, and places of
// their own, to those after a fault of the transport. What a body drew from two engines does not count against these at
// all.
type Retries struct {
	share float64
	born  time.Time

	mu       sync.Mutex
	counts   [budgetSeconds]budgetCount // a ring
	underWay [causes]int                // retries that are under way, their pauses included: by Cause
}

// Cause is after what a retry comes.
type Cause uint8

// The causes.
const (
	Transport Cause = iota // the engine has not answered
	Answered
	Hedge  // none: a prefill is slow, and has a second one beside it
	causes = iota
)

// drawnShare is how much of the share retries after an answer and second prefills may take together, and hedgeShare how
// much the latter.
const drawnShare, hedgeShare = 0.75, 0.5

// NewRetries bounds retries to a share of the requests.
func NewRetries(share float64) *Retries { return &Retries{share: share, born: time.Now()} }

// budgetCount counts what began in a second. drawn are retries whose bodies drew an error from two engines: they are
// not among retries any more.
type budgetCount struct {
	second, requests int
	retries          [causes]int
	drawn            int
}

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
func (b *Retries) Take(after Cause) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	if b.underWay[after] >= budgetFloor && !b.room(now.second, after) {
		return false
	}
	now.retries[after]++
	b.underWay[after]++
	return true
}

func (b *Retries) room(second int, after Cause) bool {
	var sum budgetCount
	for _, c := range b.counts {
		if c.second > second-budgetSeconds {
			sum.requests, sum.drawn = sum.requests+c.requests, sum.drawn+c.drawn
			for cause, n := range c.retries {
				sum.retries[cause] += n
			}
		}
	}
	most := b.share * float64(sum.requests)
	answered, hedges := float64(sum.retries[Answered]), float64(sum.retries[Hedge])
	switch all := float64(sum.retries[Transport]) + answered + hedges; {
	case all >= most:
		return false
	case after == Transport:
		return true
	case after == Hedge && hedges >= hedgeShare*most, answered+hedges >= drawnShare*most:
		return false
	}
	return after == Hedge || answered+float64(sum.drawn) < most
}

// Give ends a retry.
func (b *Retries) Give(after Cause) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.underWay[after]--
}

// Drawn notes that the body of a retry after an answer has drawn an error from another engine, too.
func (b *Retries) Drawn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	now.retries[Answered]--
	now.drawn++
}
