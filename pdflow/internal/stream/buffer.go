// SPDX-License-Identifier: Apache-2.0

package stream

import "sync"

// smallBuffer is one read of a response, in bytes. It is held as long as the response runs, but not while a stream
// waits for its next part (see Stream.wait).
const smallBuffer = 4 << 10

// bulkBuffer is one read of a response that comes faster than it is passed on: each read then saves a write, too.
const bulkBuffer = 32 << 10

var (
	smallBuffers = sync.Pool{New: func() any { return new([smallBuffer]byte) }}
	bulkBuffers  = sync.Pool{New: func() any { return new([bulkBuffer]byte) }}
)

// buffer is what a response is read into.
type buffer struct {
	buf        []byte
	pooled     *[smallBuffer]byte // what buf is of; nil if it is of neither pool
	bulk       *[bulkBuffer]byte
	full       bool // the last read filled the buffer
	smallReads int  // reads since one was larger than a small buffer
	shared     bool // somebody may still hold a piece of it: it is not given back
}

func (b *buffer) small() {
	b.pooled = smallBuffers.Get().(*[smallBuffer]byte)
	b.buf = b.pooled[:]
}

func (b *buffer) free() {
	if b.pooled != nil && !b.shared {
		smallBuffers.Put(b.pooled)
	}
	if b.bulk != nil && !b.shared {
		bulkBuffers.Put(b.bulk)
	}
	b.pooled, b.bulk, b.buf = nil, nil, nil
}

// grow makes more room for a head of n bytes.
func (b *buffer) grow(n int) {
	bigger := make([]byte, min(4*len(b.buf), maxHead))
	copy(bigger, b.buf[:n])
	b.free()
	b.buf = bigger
}

// choose takes a larger buffer once a read has filled the small one, and gives it back when reads are small again: most
// open streams wait for a token, and a thousand of them should not hold a thousand large buffers.
func (b *buffer) choose() {
	switch {
	case b.bulk == nil && (b.full || b.buf == nil):
		b.free()
		b.bulk = bulkBuffers.Get().(*[bulkBuffer]byte)
		b.buf = b.bulk[:]
		b.smallReads = 0
	case b.bulk != nil && b.smallReads >= 8:
		b.free()
		b.small()
	case b.bulk != nil:
		b.smallReads++
	}
}

// took notes that a read gave n bytes, and held others back.
func (b *buffer) took(n, held int) {
	if b.full = n+held >= len(b.buf); n > smallBuffer {
		b.smallReads = 0
	}
}

// waiter is a response body of pdkit's own transport, or one that passes it on: WaitReadable returns when bytes have
// come, or when Read would return at once for another reason.
type waiter interface{ WaitReadable() }

// wait waits for the next part of a stream that is not in a hurry, without a buffer. It returns at once where a reader
// before the engine's bytes has something left.
func (s *Stream) wait() {
	b := &s.buffer
	if s.waits == nil || b.bulk != nil || b.full || s.n > 0 || b.pooled == nil || s.faults.Holds() ||
		s.rewriter != nil && s.rewriter.Holds() {
		return
	}
	b.free()
	s.waits.WaitReadable()
	b.small()
}
