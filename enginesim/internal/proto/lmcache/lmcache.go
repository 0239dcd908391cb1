// SPDX-License-Identifier: Apache-2.0

// Package lmcache is LMCacheConnectorV1 over a store that engines share.
package lmcache

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

// lmcache stores prompts in chunks, and loads what it finds from the first chunk on. It follows
// lmcache/integration/vllm/vllm_v1_adapter.py and cache_engine.py (LMCache 0.5): whole chunks only, keys chained from
// the prompt's beginning and seeded with PYTHONHASHSEED, a kv_producer that does not look up, a kv_consumer that does
// not store, and the last token of a prompt always computed.
//
// Config.Extra: store (a folder; engines with the same one share it), chunk_size (tokens, default 256, a multiple of
// BlockSize), hash_seed (PYTHONHASHSEED: random for each process unless it is set), put_delay (how long a chunk takes
// to get into the store, as a Go duration; the real put is asynchronous, too).
type lmcache struct {
	core.NoConnector
	host  *proto.Host
	store *proto.Store
	chunk int // blocks
	delay time.Duration

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	chunk, delay := ChunkBlocks(h, set), set.Duration("put_delay")
	if err := set.Err(); err != nil {
		return nil, err
	}
	// Chunks of another size have other keys.
	store, err := proto.OpenStore(h, h.Extra["store"], HashSeed(h)+"/"+strconv.Itoa(chunk))
	if err != nil {
		return nil, err
	}
	c := &lmcache{host: h, store: store, chunk: chunk, delay: delay}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// HashSeed is what seeds the keys of chunks. Without PYTHONHASHSEED each process has its own.
func HashSeed(h *proto.Host) string {
	if seed := h.Extra["hash_seed"]; seed != "" {
		return seed
	}
	return core.RandomHex(8)
}

// ChunkBlocks is the chunk size in blocks.
func ChunkBlocks(h *proto.Host, set *proto.Settings) int {
	tokens := set.Count("chunk_size", 256)
	if tokens < 1 || tokens%h.Core.BlockSize != 0 {
		set.Fail(fmt.Errorf("chunk_size %d is no multiple of the block size %d", tokens, h.Core.BlockSize))
	}
	return tokens / h.Core.BlockSize
}

func (c *lmcache) Begin(r *core.Generation) core.Transfer {
	return &chunked{lmcache: c, local: r.Local}
}

func (c *lmcache) Close() {
	c.cancel()
	c.wg.Wait()
}

// chunked is one request's side of the store.
type chunked struct {
	core.NoTransfer
	*lmcache
	local bool
	found int // tokens
}

func (t *chunked) External() bool { return !t.local && t.host.Role != proto.RoleProducer }

func (t *chunked) Promised(s *core.Sequence) int {
	size := t.host.Core.BlockSize
	whole := s.Prompt / (size * t.chunk) * t.chunk
	t.found = min(t.store.Has(s.Keys[:whole])/t.chunk*t.chunk*size, s.Prompt-1)
	return t.found
}

func (t *chunked) Load(_ context.Context, s *core.Sequence) error {
	c, begun := t.host.Core, time.Now()
	blocks, err := t.store.Load(c, s, t.found)
	if err != nil {
		return &core.LoadError{Failures: 1, Err: err}
	}
	c.Stats.Transferred(blocks*c.BlockBytes, blocks, time.Since(begun))
	return nil
}

// Prefilled stores the prompt's whole chunks.
func (t *chunked) Prefilled(_ context.Context, s *core.Sequence) {
	if t.host.Role == proto.RoleConsumer {
		return
	}
	n := s.Prompt / (t.host.Core.BlockSize * t.chunk) * t.chunk
	keys, contents := s.Keys[:n], t.host.Core.Read(s.Blocks[:n])
	put := func() {
		for i, key := range keys {
			if t.store.Put(key, contents[i]) != nil {
				return // a store that is full or gone is no fault of the request's
			}
		}
	}
	if t.delay <= 0 {
		put()
		return
	}
	t.wg.Go(func() {
		if core.Sleep(t.ctx, t.delay) == nil {
			put()
		}
	})
}
