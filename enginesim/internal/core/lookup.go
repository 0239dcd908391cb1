// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"sync"
)

// KV is the KV of a sequence of tokens, as a [LookupBuffer] holds it.
type KV struct {
	// Request is the transfer that it was sent for: two requests with the same tokens may wait for the KV of two
	// different handoffs.
	Request uint64
	// Blocks are the contents, in the order of the tokens.
	Blocks [][]byte
	// Err is set in place of Blocks when the sender could not give them.
	Err error
}

// ErrBufferClosed is what a [LookupBuffer] answers after Close.
var ErrBufferClosed = errors.New("enginesim: lookup buffer closed")

// LookupBuffer turns the FIFO of a [Pipe] into a lookup by tokens. What leaves the prefill engine as A, B, C may be
// asked for as C, A, B: each request still finds its own KV, and takes it out. All methods may be called concurrently.
type LookupBuffer struct {
	mu      sync.Mutex
	held    map[TokenKey][]KV
	waiting map[TokenKey][]*selector
	count   int
	closed  error
}

type selector struct {
	request uint64
	found   chan KV // of size 1
}

// NewLookupBuffer makes an empty buffer.
func NewLookupBuffer() *LookupBuffer {
	return &LookupBuffer{held: map[TokenKey][]KV{}, waiting: map[TokenKey][]*selector{}}
}

// Insert puts the KV of tokens in, or gives it to a caller of DropSelect that waits for it.
func (b *LookupBuffer) Insert(tokens TokenKey, kv KV) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.insert(tokens, kv)
}

func (b *LookupBuffer) insert(tokens TokenKey, kv KV) {
	if b.closed != nil {
		return
	}
	for i, s := range b.waiting[tokens] {
		if s.request == 0 || s.request == kv.Request {
			b.dropWaiting(tokens, i)
			s.found <- kv
			return
		}
	}
	b.held[tokens] = append(b.held[tokens], kv)
	b.count++
}

// DropSelect takes the KV of tokens out of the buffer, waiting until it is there or ctx ends. request chooses among
// equal tokens; 0 takes the oldest.
func (b *LookupBuffer) DropSelect(ctx context.Context, tokens TokenKey, request uint64) (KV, error) {
	b.mu.Lock()
	if b.closed != nil {
		defer b.mu.Unlock()
		return KV{}, b.closed
	}
	for i, kv := range b.held[tokens] {
		if request == 0 || kv.Request == request {
			b.dropHeld(tokens, i)
			b.mu.Unlock()
			return kv, kv.Err
		}
	}
	s := &selector{request: request, found: make(chan KV, 1)}
	b.waiting[tokens] = append(b.waiting[tokens], s)
	b.mu.Unlock()

	select {
	case kv := <-s.found:
		return kv, kv.Err
	case <-ctx.Done():
		b.forget(tokens, s)
		return KV{}, context.Cause(ctx)
	}
}

// Discard throws away the KV of a request that nobody will ask for any more.
func (b *LookupBuffer) Discard(tokens TokenKey, request uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, kv := range b.held[tokens] {
		if kv.Request == request {
			b.dropHeld(tokens, i)
			return
		}
	}
}

// Len is the number of KVs that wait to be asked for.
func (b *LookupBuffer) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count
}

// Close ends the waiting with [ErrBufferClosed] and empties the buffer.
func (b *LookupBuffer) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = ErrBufferClosed
	for _, waiting := range b.waiting {
		for _, s := range waiting {
			s.found <- KV{Err: ErrBufferClosed}
		}
	}
	clear(b.waiting)
	clear(b.held)
	b.count = 0
}

func (b *LookupBuffer) dropHeld(tokens TokenKey, i int) {
	rest := append(b.held[tokens][:i:i], b.held[tokens][i+1:]...)
	b.count--
	if len(rest) == 0 {
		delete(b.held, tokens)
		return
	}
	b.held[tokens] = rest
}

func (b *LookupBuffer) dropWaiting(tokens TokenKey, i int) {
	rest := append(b.waiting[tokens][:i:i], b.waiting[tokens][i+1:]...)
	if len(rest) == 0 {
		delete(b.waiting, tokens)
		return
	}
	b.waiting[tokens] = rest
}

// forget takes back a selector whose caller has left. KV that reached the selector meanwhile goes back into the buffer.
func (b *LookupBuffer) forget(tokens TokenKey, s *selector) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, w := range b.waiting[tokens] {
		if w == s {
			b.dropWaiting(tokens, i)
			return
		}
	}
	select {
	case kv := <-s.found:
		b.insert(tokens, kv)
	default:
	}
}
