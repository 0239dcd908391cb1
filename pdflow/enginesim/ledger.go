// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"fmt"
	"slices"
	"sync"
)

// KVFaultKind says what went wrong with KV blocks.
type KVFaultKind string

// Kinds of KV faults that [Engine.CheckKV] finds.
const (
	// KVLeak is a handoff that nobody read: its blocks are pinned although no
	// request is left, or were until the lease ended.
	KVLeak KVFaultKind = "leak"
	// KVDoubleUse is a handoff read again after it was consumed.
	KVDoubleUse KVFaultKind = "double use"
	// KVStaleRead is a read of blocks whose lease had ended, or never was.
	KVStaleRead KVFaultKind = "stale read"
	// KVForeignRead is a read of other blocks than those of the named handoff, or
	// for another prompt than the one that was prefilled.
	KVForeignRead KVFaultKind = "foreign read"
	// KVNoTransfer is a prompt that a kv_consumer computed itself.
	KVNoTransfer KVFaultKind = "decode without transfer"
)

// KVFault is one breach of the rules of KV handoff, as the engine that noticed
// it saw it.
type KVFault struct {
	Kind    KVFaultKind
	Engine  string // engine id
	Request string // the engine's request id
}

func (f *KVFault) Error() string {
	return fmt.Sprintf("enginesim: KV %s: engine %s, request %s", f.Kind, f.Engine, f.Request)
}

const ledgerLimit = 4096

// ledger writes down what happened to the KV of one engine.
type ledger struct {
	engine string

	mu     sync.Mutex
	fate   map[string]string // of handoffs that are no longer leased
	order  []string
	faults []*KVFault
}

func newLedger(engine string) *ledger { return &ledger{engine: engine, fate: map[string]string{}} }

const (
	fateConsumed = "consumed"
	fateExpired  = "expired"
)

func (l *ledger) blame(kind KVFaultKind, request string) {
	if len(l.faults) < ledgerLimit {
		l.faults = append(l.faults, &KVFault{Kind: kind, Engine: l.engine, Request: request})
	}
}

func (l *ledger) settle(request, fate string) {
	if _, known := l.fate[request]; !known {
		if l.order = append(l.order, request); len(l.order) > ledgerLimit {
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

func (l *ledger) consumed(request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settle(request, fateConsumed)
}

func (l *ledger) expired(request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settle(request, fateExpired)
	l.blame(KVLeak, request)
}

// read notes a read of ids on behalf of request, for the prompt key; blocks and
// prompt are what its lease covers, if there is one.
func (l *ledger) read(request string, ids []int32, key TokenKey, blocks []int32, prompt TokenKey, leased bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case !leased && l.fate[request] == fateConsumed:
		l.blame(KVDoubleUse, request)
	case !leased:
		l.blame(KVStaleRead, request)
	case key != prompt || !endsWith(blocks, ids):
		l.blame(KVForeignRead, request)
	}
}

// endsWith says whether ids are what a reader takes of blocks: a run of them, up
// to the last or to the last of the prompt.
func endsWith(blocks, ids []int32) bool {
	for first := range blocks {
		if len(blocks)-first >= len(ids) && slices.Equal(blocks[first:first+len(ids)], ids) {
			return true
		}
	}
	return false
}

func (l *ledger) computedByConsumer(request string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blame(KVNoTransfer, request)
}

// found gives the faults so far, and the handoffs that are pinned for nobody.
func (l *ledger) found(pinned []string) []error {
	l.mu.Lock()
	defer l.mu.Unlock()
	errs := make([]error, 0, len(l.faults)+len(pinned))
	for _, f := range l.faults {
		errs = append(errs, f)
	}
	for _, request := range pinned {
		errs = append(errs, &KVFault{Kind: KVLeak, Engine: l.engine, Request: request})
	}
	return errs
}
