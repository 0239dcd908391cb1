// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/internal/intake"
)

// Budget bounds the bytes that requests hold at the same time: clients' bodies, until their responses have ended, and
// the responses of prefill and encode engines, until their attempts have; of a prefill leg that runs on
// (connector.Ending.PrefillFinishes) both until it has ended. All flows, muxes and handlers that are given
// the same budget share it. A request for which nothing is left is refused with [CodeOverloaded]. Bytes are taken when
// memory is, and memory grows with what has arrived: a client that announces a large body and sends nothing takes
// 16 KiB at most. Bodies and responses of more than 64 KiB leave an eighth of the bytes to the others, so that large
// ones, however many, do not keep small ones out.
//
// The bodies that [Flow.Do], [Flow.Begin] and [Flow.RoundTripper] get are their callers', who may count them by Take.
type Budget struct {
	// Bytes are how many may be taken. Seven eighths of it should hold several of the largest bodies and of the prefill
	// engines' largest responses. It must not change while the budget is used.
	Bytes int64

	inUse, refused atomic.Int64
}

// What is larger than smallBody leaves 1/smallShare of the budget to what is not.
const (
	smallBody  = 64 << 10
	smallShare = 8
)

// Take takes the n bytes of a body, or none and returns false if so many are not left.
func (b *Budget) Take(n int64) bool { return b.TakePart(n, n) }

// TakePart is Take for n bytes of a body that has size bytes in all, as far as that is known.
func (b *Budget) TakePart(n, size int64) bool {
	most := b.Bytes
	if size > smallBody {
		most -= most / smallShare
	}
	for used := b.inUse.Load(); n <= most-used; used = b.inUse.Load() {
		if b.inUse.CompareAndSwap(used, used+n) {
			return true
		}
	}
	b.refused.Add(1)
	return false
}

// Give gives back what Take took.
func (b *Budget) Give(n int64) { b.inUse.Add(-n) }

// InUse returns how many bytes are taken.
func (b *Budget) InUse() int64 { return b.inUse.Load() }

// Refused returns how often Take returned false.
func (b *Budget) Refused() int64 { return b.refused.Load() }

// holding is what one request holds of a budget. A nil one takes nothing.
type holding struct {
	b     *Budget
	n     atomic.Int64
	users atomic.Int32 // the last that gives it back does so
}

func (b *Budget) hold() *holding {
	if b == nil {
		return nil
	}
	h := &holding{b: b}
	h.keep()
	return h
}

// keep is followed by a giveBack of its own.
func (h *holding) keep() {
	if h != nil {
		h.users.Add(1)
	}
}

// taker is for intake.
func (h *holding) taker() intake.Taker {
	if h == nil {
		return nil
	}
	return func(n, size int64) bool {
		ok := h.b.TakePart(n, size)
		if ok {
			h.n.Add(n)
		}
		return ok
	}
}

func (h *holding) giveBack() {
	if h != nil && h.users.Add(-1) == 0 {
		h.b.Give(h.n.Swap(0))
	}
}

// noMemory refuses a request for which the budget has no bytes left.
func noMemory(leg LegKind, phase string, err error) *Error {
	return &Error{Code: CodeOverloaded, Leg: leg, Phase: phase, Message: "too many large requests at the same time",
		RetryAfter: time.Second, Err: err}
}

// WithBudget bounds the bytes of the requests in flight, over all that share the budget. Default: no bound.
func WithBudget(b *Budget) Option {
	return optionFunc(func(o *options) error {
		o.budget = b
		return needs("WithBudget", b != nil && b.Bytes > 0, "a budget of 1 byte or more")
	})
}
