// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"sync"

	"github.com/pdkit/pdkit/transport"
)

// meeting lets two legs that run together go out only when the connections of both stand. So an engine that cannot be reached leaves
// no orphan in the other, which would wait for KV that nobody computes, or keep KV that nobody reads: D of some protocols never gives
// up, and holds P's sender meanwhile (captures mooncake/17).
type meeting struct {
	mu   sync.Mutex
	here [2]bool
	both chan struct{}
}

func newMeeting() *meeting { return &meeting{both: make(chan struct{})} }

const (
	prefillSide = iota
	decodeSide
)

// hold returns the context of a leg that waits for the other one. then is called when it goes out.
func (m *meeting) hold(ctx context.Context, side int, then func()) context.Context {
	return transport.BeforeSend(ctx, func() error {
		m.mu.Lock()
		if !m.here[side] {
			if m.here[side] = true; m.here[1-side] {
				close(m.both)
			}
		}
		m.mu.Unlock()
		select {
		case <-m.both:
			then()
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
}
