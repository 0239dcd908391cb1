// SPDX-License-Identifier: Apache-2.0

// Package load has the benchmark's clients and engines. Both run in one process, so each response can be compared with
// the request that was sent, and each handoff with the one that the prefill engine gave.
//
// Clients and engines speak HTTP/1.1 over plain sockets with code of their own. They share one CPU, and together must
// cost less than the proxy between them: otherwise the benchmark would measure them.
package load

import (
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"
)

// Slots is how many clients can send requests at the same time.
const Slots = 1100

// bigInteger is the smallest positive integer that a float64 cannot hold. A proxy that decodes the handoff's numbers
// into floats changes it, and is caught.
const bigInteger = 1<<53 + 1

// Plan is when a client sends requests, and what an engine does for its decode legs.
type Plan struct {
	Prompt   *Prompt
	Chunks   int           // events of a stream; 0: until Stop
	PerWrite int           // events that the engine sends in one write
	Interval time.Duration // between two writes; 0: as fast as the socket takes them
	Every    time.Duration // between two requests of the client; 0: the next one follows the response
	Phase    time.Duration // of the first write inside Interval, or of the first request inside Every
	Stop     *atomic.Bool  // ends streams whose Chunks is 0
}

// slot is one client as the engines see it.
type slot struct {
	plan   atomic.Pointer[Plan]
	serial atomic.Uint64 // request under way
	word   atomic.Uint64 // that the right response to it holds, as hex; set by the prefill engine
	chunks atomic.Int64  // events of its stream, -1 until the engine knows
	sentAt atomic.Int64  // when the engine wrote last, ns since the board was made
}

// ticket is a handoff that was given and not used yet.
type ticket struct {
	slot    int
	serial  uint64
	handoff []byte
}

// Board holds what clients and engines share. It is safe for concurrent use.
type Board struct {
	seed      maphash.Seed
	born      time.Time
	byMeaning bool // engines compare legs by meaning, not byte for byte
	slots     [Slots]slot
	prompt    atomic.Pointer[Prompt] // of the latest plan, to recognise it fast

	// How prefill legs and decode legs spelled the messages last; used by meaning only.
	prefillSpelling, decodeSpelling atomic.Pointer[spelling]

	lastSerial  atomic.Uint64
	lastHandoff atomic.Uint64
	prefills    atomic.Int64
	decodes     atomic.Int64

	mu      sync.Mutex
	open    map[uint64]*ticket // by handoff number
	spare   []*ticket
	faults  []string
	nFaults int
}

// NewBoard returns a board without requests.
func NewBoard() *Board {
	return &Board{seed: maphash.MakeSeed(), born: time.Now(), open: make(map[uint64]*ticket)}
}

// NewBoardByMeaning returns a board for a proxy that decodes a request and writes it anew. Its engines accept other
// spellings of the same JSON: another order of members, other spaces and escapes, numbers written in another way. They
// also accept members that the client did not send, since such proxies add defaults.
func NewBoardByMeaning() *Board {
	b := NewBoard()
	b.byMeaning = true
	return b
}

// Fault notes a fault. The board keeps the texts of the first few and counts all.
func (b *Board) Fault(format string, args ...any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.nFaults++
	if len(b.faults) < 20 {
		b.faults = append(b.faults, fmt.Sprintf(format, args...))
	}
}

// Faults returns the texts of the first few faults, and the number of all.
func (b *Board) Faults() (first []string, total int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string(nil), b.faults...), b.nFaults
}

// TakeFaults returns what Faults returns, and forgets it.
func (b *Board) TakeFaults() (first []string, total int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	first, total = b.faults, b.nFaults
	b.faults, b.nFaults = nil, 0
	return first, total
}

// Settle notes a fault for each handoff that no decode leg has brought back, and forgets it. Call it when no request is
// under way.
func (b *Board) Settle() {
	b.mu.Lock()
	lost := len(b.open)
	clear(b.open)
	b.mu.Unlock()
	if lost > 0 {
		b.Fault("%d handoffs were given and never reached a decode engine", lost)
	}
}

// Served returns how many prefill and decode legs were answered.
func (b *Board) Served() (prefills, decodes int64) { return b.prefills.Load(), b.decodes.Load() }

// Assign says what the engines do for one client from now on.
func (b *Board) Assign(slot int, plan *Plan) {
	b.prompt.Store(plan.Prompt)
	b.slots[slot].plan.Store(plan)
}

// now returns the nanoseconds since the board was made, which fit into an atomic.
func (b *Board) now() int64 { return int64(time.Since(b.born)) }

// begin opens a client's next request.
func (b *Board) begin(index int) (serial uint64) {
	s := &b.slots[index]
	serial = b.lastSerial.Add(1)
	s.word.Store(0)
	s.chunks.Store(-1)
	s.serial.Store(serial)
	return serial
}

// give makes the handoff of a prefill leg, and keeps a copy until the decode leg brings it back.
func (b *Board) give(dst []byte, index int, serial uint64) []byte {
	number := bigInteger + b.lastHandoff.Add(1)
	start := len(dst)
	dst = appendHandoff(dst, b.slots[index].plan.Load().Prompt.blocks, serial, number)
	handoff := dst[start:]
	b.slots[index].word.Store(b.wordFor(handoff, serial))

	b.mu.Lock()
	defer b.mu.Unlock()
	t := &ticket{}
	if n := len(b.spare); n > 0 {
		t, b.spare = b.spare[n-1], b.spare[:n-1]
	}
	t.slot, t.serial, t.handoff = index, serial, append(t.handoff[:0], handoff...)
	b.open[number] = t
	return dst
}

// take accepts a handoff from a decode leg. It must be the one that was given for this request, unchanged and not used
// before.
func (b *Board) take(handoff []byte, index int, serial uint64) (word uint64, err error) {
	number, ok := handoffNumber(handoff)
	if b.byMeaning {
		number, ok = handoffNumberAnywhere(handoff)
	}
	if !ok {
		return 0, fmt.Errorf("decode: the handoff has lost its number")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	t, ok := b.open[number]
	switch {
	case !ok:
		return 0, fmt.Errorf("decode: handoff %d was never given, or has been used before", number)
	case b.byMeaning && !sameObject(t.handoff, handoff):
		return 0, fmt.Errorf("decode: handoff %d does not mean what prefill gave", number)
	case !b.byMeaning && string(t.handoff) != string(handoff):
		return 0, fmt.Errorf("decode: handoff %d is not byte for byte what prefill gave", number)
	case t.slot != index || t.serial != serial:
		return 0, fmt.Errorf("decode: handoff %d belongs to another request", number)
	}
	delete(b.open, number)
	b.spare = append(b.spare, t)
	return b.wordFor(t.handoff, serial), nil
}

// wordFor is the toy model: the word of a response depends on every byte of the handoff and on the prompt.
func (b *Board) wordFor(handoff []byte, serial uint64) uint64 {
	word := maphash.Bytes(b.seed, handoff) ^ serial*0x9e3779b97f4a7c15
	return max(word, 1) // 0 stands for: no prefill yet
}
