// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
	"sync"
)

// mooncakeStore is one engine's side: a kv_producer puts, a kv_consumer gets, and
// kv_both does both (docs/features/mooncake_store_connector_usage.md, vLLM 01529cf).
type mooncakeStore struct {
	noConnector
	host  *host
	store *blockStore

	mu                 sync.Mutex
	puts, gets         int64 // blocks
	bytesPut, bytesGot int64
}

func startMooncakeStore(h *host) (connector, error) {
	seed := h.extra["hash_seed"]
	if prefix := h.extra["cache_prefix"]; prefix != "" {
		seed = prefix + "@" + seed
	}
	store, err := openStore(h, h.extra["store"], seed)
	if err != nil {
		return nil, err
	}
	return &mooncakeStore{host: h, store: store}, nil
}

func (c *mooncakeStore) begin(r *kvRequest) transfer {
	role := c.host.role
	return &pooled{c: c, puts: role != roleConsumer, gets: role != roleProducer && !r.local}
}

// metrics are those that the connector adds to the page.
func (c *mooncakeStore) metrics(p *page) {
	c.mu.Lock()
	defer c.mu.Unlock()
	const get, put = `,operation="load_get",status="ok"`, `,operation="save_put",status="ok"`
	if c.gets+c.puts == 0 {
		return // labels appear with the first operation
	}
	p.family("mooncake_store_operation_keys_total", "counter", sample{after: get, value: float64(c.gets)}, sample{after: put, value: float64(c.puts)})
	p.family("mooncake_store_operation_bytes_total", "counter", sample{after: get, value: float64(c.bytesGot)}, sample{after: put, value: float64(c.bytesPut)})
}

// pooled is one request's side.
type pooled struct {
	noTransfer
	c          *mooncakeStore
	puts, gets bool
	upto       int // tokens that the pool holds
}

func (t *pooled) external() bool { return t.gets }

// promised looks up the blocks that the engine itself has not: whole ones only.
func (t *pooled) promised(s *sequence) int {
	size := t.c.host.core.blockSize
	first, full := s.computed/size, s.prompt/size
	t.upto = s.computed
	if full > first {
		t.upto = (first + t.c.store.has(s.keys[first:full])) * size
	}
	return t.upto
}

var errEvicted = errors.New("the pool has lost a block")

func (t *pooled) load(_ context.Context, s *sequence) error {
	size := t.c.host.core.blockSize
	var blocks [][]byte
	for _, key := range s.keys[s.computed/size : t.upto/size] {
		block, ok, err := t.c.store.get(key)
		if err != nil {
			return &loadError{err: err}
		}
		if !ok || len(block) != t.c.host.core.blockBytes {
			return &loadError{err: errEvicted}
		}
		blocks = append(blocks, block)
	}
	t.c.host.core.fill(s, blocks, t.upto)
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	t.c.gets += int64(len(blocks))
	t.c.bytesGot += int64(len(blocks) * t.c.host.core.blockBytes)
	return nil
}

// prefilled puts the prompt's whole blocks. With the real engine that may end
// after P's answer.
func (t *pooled) prefilled(_ context.Context, s *sequence) {
	if !t.puts {
		return
	}
	h := t.c.host
	full := s.prompt / h.core.blockSize
	contents := h.core.read(s.blocks[:full])
	for i, key := range s.keys[:full] {
		if t.c.store.has([]TokenKey{key}) == 1 || t.c.store.put(key, contents[i]) != nil {
			continue
		}
		t.c.mu.Lock()
		t.c.puts++
		t.c.bytesPut += int64(len(contents[i]))
		t.c.mu.Unlock()
	}
}
