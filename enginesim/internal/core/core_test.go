// SPDX-License-Identifier: Apache-2.0

package core

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func testCore(t *testing.T, blocks int) *Core {
	c := New(Config{BlockSize: 4, Blocks: blocks, BytesPerToken: 16, MaxRunning: 256, Lease: 30 * time.Second},
		func() {})
	t.Cleanup(c.Close)
	return c
}

func seq(id string, tokens ...int32) *Sequence {
	return &Sequence{ID: id, Tokens: tokens, Prompt: len(tokens)}
}

func run(t *testing.T, c *Core, s *Sequence) *Sequence {
	require.NoError(t, c.admit(t.Context(), s, false, func() {}))
	c.compute(s, len(s.Tokens))
	return s
}

// TestBlockContent follows from the block's tokens, the block before and the seed, and from nothing else.
func TestBlockContent(t *testing.T) {
	content := func(seed uint64, tokens ...int32) []byte {
		c := testCore(t, 8)
		c.model.seed = seed
		s := run(t, c, seq("s", tokens...))
		return bytes.Clone(c.pool.bytes(s.Blocks[1]))
	}
	base := content(0, 1, 2, 3, 4, 5, 6, 7, 8)
	assert.Equal(t, base, content(0, 1, 2, 3, 4, 5, 6, 7, 8))
	assert.NotEqual(t, base, content(0, 1, 2, 3, 4, 5, 6, 7, 9), "other tokens")
	assert.NotEqual(t, base, content(0, 9, 2, 3, 4, 5, 6, 7, 8), "another block before")
	assert.NotEqual(t, base, content(1, 1, 2, 3, 4, 5, 6, 7, 8), "another seed")
}

// TestNextTokenDependsOnEveryByteHeld: one bit anywhere in the blocks of a sequence changes what follows.
func TestNextTokenDependsOnEveryByteHeld(t *testing.T) {
	c := testCore(t, 8)
	s := run(t, c, seq("s", 1, 2, 3, 4, 5, 6, 7, 8))
	whole := s.digest
	for _, id := range s.Blocks {
		for i := range c.pool.size {
			c.pool.bytes(id)[i] ^= 1
			s.Computed, s.digest = 0, c.model.digestStart()
			c.absorb(s, 8)
			assert.NotEqual(t, whole, s.digest, "block %d, byte %d", id, i)
			c.pool.bytes(id)[i] ^= 1
		}
	}
}

// TestDigestIsTheSameComputedAndRead: computed at once, token by token, or read from memory.
func TestDigestIsTheSameComputedAndRead(t *testing.T) {
	c := testCore(t, 8)
	whole := run(t, c, seq("a", 1, 2, 3, 4, 5, 6))
	grown := run(t, c, seq("b", 1, 2))
	for _, token := range []int32{3, 4, 5, 6} {
		require.True(t, c.grow(grown, token))
		c.compute(grown, len(grown.Tokens))
	}
	cached := run(t, c, seq("c", 1, 2, 3, 4, 5, 6))
	assert.Equal(t, 4, cached.Cached)
	assert.Equal(t, whole.digest, grown.digest)
	assert.Equal(t, whole.digest, cached.digest)
}

// TestFreedBlocksAreReusedLongestFreeFirst, and a reused block leaves the cache.
func TestFreedBlocksAreReusedLongestFreeFirst(t *testing.T) {
	c := testCore(t, 4)
	a := run(t, c, seq("a", 1, 1, 1, 1, 2, 2))
	first := a.Blocks
	b := run(t, c, seq("b", 3, 3, 3, 3, 4, 4))
	second := b.Blocks
	c.release(b)
	c.release(a)
	assert.Zero(t, c.pool.used())
	d := run(t, c, seq("d", 9, 9, 9, 9, 9, 9))
	assert.Equal(t, []int32{second[1], second[0]}, d.Blocks, "b was freed before a, its tail first")
	assert.Zero(t, run(t, c, seq("e", 1, 1, 1, 1, 2, 2)).Blocks[0]-first[0], "a's prefix is still cached")
	_, known := c.pool.cached[seqKey(c, 3, 3, 3, 3)]
	assert.False(t, known, "b's is not")
}

func seqKey(c *Core, tokens ...int32) TokenKey {
	s := seq("k", tokens...)
	c.chain(s)
	return s.Keys[0]
}

// TestAdmissionIsFirstComeFirstServed: a small request does not overtake a large one that waits, and one that gives up
// lets the next in.
func TestAdmissionIsFirstComeFirstServed(t *testing.T) {
	c := testCore(t, 4)
	busy := run(t, c, seq("busy", 1, 1, 1, 1, 1, 1, 1, 1))
	queue := func(ctx context.Context, s *Sequence) chan error {
		queued, done := make(chan struct{}), make(chan error, 1)
		go func() { done <- c.admit(ctx, s, false, func() { close(queued) }) }()
		select {
		case <-queued:
		case <-time.After(20 * time.Second):
			require.Fail(t, "did not queue")
		}
		return done
	}
	ctx, giveUp := context.WithCancelCause(t.Context())
	large := queue(ctx, seq("large", make([]int32, 16)...))
	small := queue(t.Context(), seq("small", 2))
	assert.Equal(t, 2, c.Totals().Waiting)
	gone := errors.New("gone")
	giveUp(gone)
	assert.ErrorIs(t, <-large, gone)
	assert.NoError(t, <-small)
	c.release(busy)
	assert.Zero(t, c.Totals().Waiting)
}

// TestLeaseOutlivesItsSequence, and ends once.
func TestLeaseOutlivesItsSequence(t *testing.T) {
	c := testCore(t, 4)
	s := run(t, c, seq("a", 1, 2, 3, 4, 5))
	blocks := c.Pin(s, KeyOf(s.Tokens))
	c.release(s)
	assert.Equal(t, 2, c.pool.used())
	assert.Equal(t, Totals{UsedBlocks: 2, PinnedBlocks: 2}, c.Totals())
	assert.Len(t, blocks, 2)
	assert.True(t, c.Unpin("a"))
	assert.False(t, c.Unpin("a"))
	assert.Zero(t, c.pool.used())
}
