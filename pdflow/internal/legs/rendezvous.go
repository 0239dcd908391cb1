// SPDX-License-Identifier: Apache-2.0

// Package legs makes the HTTP request of a leg, in memory that serves the next one, and has two legs that run together
// wait for each other.
package legs

import (
	"context"
	"sync"

	"github.com/pdkit/pdkit/transport"
)

// Rendezvous lets two legs that run together go out only when the connections of both stand. So an engine that cannot
// be reached leaves no orphan in the other, which would wait for KV that nobody computes, or keep KV that nobody
// reads: D of some protocols never gives up, and holds P's sender meanwhile (docs/protocols/mooncake.md, recording 17).
//
// It has two stages. A leg whose round tripper reads the body first is at the first stage: there it waits for the other
// leg to get as far, and not for its connection, since the other may read its body first too.
type Rendezvous [2]stage

// stage is where both legs wait for each other.
type stage struct {
	mu   sync.Mutex
	here [2]bool
	both chan struct{}
}

// NewRendezvous makes a rendezvous of two legs.
func NewRendezvous() *Rendezvous {
	return &Rendezvous{{both: make(chan struct{})}, {both: make(chan struct{})}}
}

// Side is one of the two legs.
type Side int

// The sides.
const (
	Prefill Side = iota
	Decode
)

func (s *stage) reach(side Side) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.here[side] {
		return
	}
	if s.here[side] = true; s.here[1-side] {
		close(s.both)
	}
}

// Hold returns the context of a leg that waits for the other one.
func (r *Rendezvous) Hold(ctx context.Context, side Side) context.Context {
	return transport.BeforeSend(ctx, func(connected bool) error { return r.Wait(ctx, side, connected) })
}

// Wait returns when the other leg has got as far as this one. r may be nil, of a leg that waits for none.
func (r *Rendezvous) Wait(ctx context.Context, side Side, connected bool) error {
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

// Arrived lets the other leg wait no longer for this one. r may be nil.
func (r *Rendezvous) Arrived(side Side) {
	if r != nil {
		r[0].reach(side)
		r[1].reach(side)
	}
}
