// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"
)

// lmcache stores prompts in chunks, and loads what it finds from the first chunk on.
// It follows lmcache/integration/vllm/vllm_v1_adapter.py and cache_engine.py
// (LMCache 0.5): whole chunks only, keys chained from the prompt's beginning and
// seeded with PYTHONHASHSEED, a kv_producer that does not look up, a kv_consumer
// that does not store, and the last token of a prompt always computed.
//
// Config.Extra: store (a folder; engines with the same one share it), chunk_size
// (tokens, default 256, a multiple of BlockSize), hash_seed (PYTHONHASHSEED: random
// for each process unless it is set), put_delay (how long a chunk takes to get into
// the store, as a Go duration; the real put is asynchronous, too).
type lmcache struct {
	noConnector
	host  *host
	store *blockStore
	chunk int // blocks
	delay time.Duration

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func startLMCache(h *host) (connector, error) {
	set := h.settings()
	chunk, delay := chunkBlocks(h, set), set.duration("put_delay")
	if err := set.err(); err != nil {
		return nil, err
	}
	// Chunks of another size have other keys.
	store, err := openStore(h, h.extra["store"], hashSeed(h)+"/"+strconv.Itoa(chunk))
	if err != nil {
		return nil, err
	}
	c := &lmcache{host: h, store: store, chunk: chunk, delay: delay}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// hashSeed is what seeds the keys of chunks. Without PYTHONHASHSEED each process
// has its own.
func hashSeed(h *host) string {
	if seed := h.extra["hash_seed"]; seed != "" {
		return seed
	}
	return randomHex(8)
}

// chunkBlocks is the chunk size in blocks.
func chunkBlocks(h *host, set *settings) int {
	tokens := set.count("chunk_size", 256)
	if tokens < 1 || tokens%h.core.blockSize != 0 {
		set.fail(fmt.Errorf("chunk_size %d is no multiple of the block size %d", tokens, h.core.blockSize))
	}
	return tokens / h.core.blockSize
}

func (c *lmcache) begin(r *kvRequest) transfer { return &chunked{lmcache: c, local: r.local} }

func (c *lmcache) close() {
	c.cancel()
	c.wg.Wait()
}

// chunked is one request's side of the store.
type chunked struct {
	noTransfer
	*lmcache
	local bool
	found int // tokens
}

func (t *chunked) external() bool { return !t.local && t.host.role != roleProducer }

func (t *chunked) promised(s *sequence) int {
	size := t.host.core.blockSize
	whole := s.prompt / (size * t.chunk) * t.chunk
	t.found = min(t.store.has(s.keys[:whole])/t.chunk*t.chunk*size, s.prompt-1)
	return t.found
}

var errChunkGone = errors.New("a chunk is no longer in the store")

func (t *chunked) load(_ context.Context, s *sequence) error {
	size := t.host.core.blockSize
	var contents [][]byte
	begun := time.Now()
	for i := s.computed / size; i*size < t.found; i++ {
		block, ok, err := t.store.get(s.keys[i])
		if err == nil && !ok {
			err = errChunkGone
		}
		if err != nil {
			return &loadError{failures: 1, err: err}
		}
		contents = append(contents, block)
	}
	t.host.core.fill(s, contents, t.found)
	t.host.core.stats.transferred(len(contents)*t.host.core.blockBytes, len(contents), time.Since(begun))
	return nil
}

// prefilled stores the prompt's whole chunks.
func (t *chunked) prefilled(_ context.Context, s *sequence) {
	if t.host.role == roleConsumer {
		return
	}
	n := s.prompt / (t.host.core.blockSize * t.chunk) * t.chunk
	keys, contents := s.keys[:n], t.host.core.read(s.blocks[:n])
	put := func() {
		for i, key := range keys {
			if t.store.put(key, contents[i]) != nil {
				return // a store that is full or gone is no fault of the request's
			}
		}
	}
	if t.delay <= 0 {
		put()
		return
	}
	t.wg.Go(func() {
		if sleep(t.ctx, t.delay) == nil {
			put()
		}
	})
}
