// SPDX-License-Identifier: Apache-2.0

package core

import (
	"slices"
	"sync"
)

// Kinds of breaches.
const (
	Leak          = "leak"
	DoubleUse     = "double use"
	StaleRead     = "stale read"
	ForeignRead   = "foreign read"
	NoTransferred = "decode without transfer"
)

// Breach is one breach of the rules of KV handoff: what went wrong, and with which request's KV.
type Breach struct{ Kind, Request string }

// LedgerLimit bounds what is remembered of past handoffs, and the breaches that are kept.
const LedgerLimit = 4096

// ledger writes down what happened to the KV of one engine.
type ledger struct {
	mu     sync.Mutex
	fate   map[string]string // of handoffs that are no longer leased
	order  []string
	faults []Breach
}

func newLedger() *ledger { return &ledger{fate: map[string]string{}} }

const (
	fateConsumed = "consumed"
	fateExpired  = "expired"
)

func (l *ledger) blame(kind, request string) {
	if len(l.faults) < LedgerLimit {
		l.faults = append(l.faults, Breach{kind, request})
	}
}

func (l *ledger) settle(request, fate string) {
	if _, known := l.fate[request]; !known {
		if l.order = append(l.order, request); len(l.order) > LedgerLimit {
			delete(l.fate, l.order[0])
			l.order = l.order[1:]
		}
	}
	l.fate[request] = fate
}

func (l *ledger) handedOff(request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.fate, request)
}

func (l *ledger) Consumed(request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settle(request, fateConsumed)
}

func (l *ledger) expired(request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settle(request, fateExpired)
	l.blame(Leak, request)
}

// Read notes that ids were read for a request and for the prompt with a key. If the request is leased, blocks and
// prompt are what its lease covers.
func (l *ledger) Read(request string, ids []int32, key TokenKey, blocks []int32, prompt TokenKey, leased bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !leased && l.fate[request] == fateConsumed:
		l.blame(DoubleUse, request)
	case !leased:
		l.blame(StaleRead, request)
	case key != prompt || !contains(blocks, ids):
		l.blame(ForeignRead, request)
	}
}

// contains reports whether ids are what a reader takes of blocks: some of them, one after another.
func contains(blocks, ids []int32) bool {
	for first := range blocks {
		if len(blocks)-first >= len(ids) && slices.Equal(blocks[first:first+len(ids)], ids) {
			return true
		}
	}
	return false
}

func (l *ledger) ComputedByConsumer(request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blame(NoTransferred, request)
}

// found returns the breaches so far, and a leak for each request in pinned.
func (l *ledger) found(pinned []string) []Breach {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := slices.Clone(l.faults)
	for _, request := range pinned {
		all = append(all, Breach{Leak, request})
	}
	return all
}
