// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"sync"

	"github.com/pdkit/pdkit/transport"
)

// rendezvous lets two legs that run together go out only when the connections of both stand. So an engine that cannot
// be reached leaves no orphan in the other, which would wait for KV that nobody computes, or keep KV that nobody
// reads: D of some protocols never gives up, and holds P's sender meanwhile (docs/protocols/mooncake.md, recording 17).
//
// It has two stages. A leg whose round tripper reads the body first is at the first stage: there it waits for the other
// leg to get as far, and not for its connection, since the other may read its body first too.
type rendezvous [2]stage

// stage is where both legs wait for each other.
type stage struct {
	mu   sync.Mutex
	here [2]bool
	both chan struct{}
}

func newRendezvous() *rendezvous {
	return &rendezvous{{both: make(chan struct{})}, {both: make(chan struct{})}}
}

const (
	prefillSide = iota
	decodeSide
)

func (s *stage) reach(side int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.here[side] {
		return
	}
	if s.here[side] = true; s.here[1-side] {
		close(s.both)
	}
}

// hold returns the context of a leg that waits for the other one.
func (r *rendezvous) hold(ctx context.Context, side int) context.Context {
	return transport.BeforeSend(ctx, func(connected bool) error { return r.wait(ctx, side, connected) })
}

// wait returns when the other leg has got as far as this one. r may be nil, of a leg that waits for none.
func (r *rendezvous) wait(ctx context.Context, side int, connected bool) error {
	if r == nil {
		return nil
	}
	s := &r[0]
	s.reach(side)
	if connected {
		s = &r[1]
		s.reach(side)
	}
	select {
	case <-s.both:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
