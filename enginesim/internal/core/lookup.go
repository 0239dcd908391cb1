// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"slices"
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
	mu     sync.Mutex
	held   map[TokenKey][]KV
	came   chan struct{} // closed and replaced when KV comes: who waits looks again
	closed bool
}

// NewLookupBuffer makes an empty buffer.
func NewLookupBuffer() *LookupBuffer {
	return &LookupBuffer{held: map[TokenKey][]KV{}, came: make(chan struct{})}
}

// Insert puts the KV of tokens in.
func (b *LookupBuffer) Insert(tokens TokenKey, kv KV) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return
	}
	b.held[tokens] = append(b.held[tokens], kv)
	close(b.came)
	b.came = make(chan struct{})
}

// DropSelect takes the KV of tokens that was sent for a request out of the buffer, waiting until it is there or ctx
// ends.
func (b *LookupBuffer) DropSelect(ctx context.Context, tokens TokenKey, request uint64) (KV, error) {
	for {
		b.mu.Lock()
		kv, found := b.drop(tokens, request)
		came, closed := b.came, b.closed
		b.mu.Unlock()
		switch {
		case found:
			return kv, kv.Err
		case closed:
			return KV{}, ErrBufferClosed
		}
		select {
		case <-came:
		case <-ctx.Done():
			return KV{}, context.Cause(ctx)
		}
	}
}

// Discard throws away the KV of a request that nobody will ask for any more.
func (b *LookupBuffer) Discard(tokens TokenKey, request uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.drop(tokens, request)
}

func (b *LookupBuffer) drop(tokens TokenKey, request uint64) (kv KV, found bool) {
	held := b.held[tokens]
	i := slices.IndexFunc(held, func(kv KV) bool { return kv.Request == request })
	if i < 0 {
		return KV{}, false
	}
	kv = held[i]
	if b.held[tokens] = slices.Delete(held, i, i+1); len(held) == 1 {
		delete(b.held, tokens)
	}
	return kv, true
}

// Len is the number of KVs that wait to be asked for.
func (b *LookupBuffer) Len() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, held := range b.held {
		n += len(held)
	}
	return n
}

// Close ends the waiting with [ErrBufferClosed] and empties the buffer.
func (b *LookupBuffer) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		close(b.came)
	}
	b.closed = true
	clear(b.held)
}
