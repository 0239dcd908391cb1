// SPDX-License-Identifier: Apache-2.0

// Package mooncakestore is vLLM's MooncakeStoreConnector: a pool in which each engine finds blocks by the tokens that
// they hold, whoever has computed them. It reads nothing from kv_transfer_params.
//
// It reads these of Config.Extra: store (a folder, in place of the pool and its master), hash_seed (PYTHONHASHSEED) and
// cache_prefix. Engines share blocks if all three are equal.
package mooncakestore

import (
	"context"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/metrics"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

// mooncakeStore is one engine's side: a kv_producer puts, a kv_consumer gets, and kv_both does both
// (docs/features/mooncake_store_connector_usage.md, vLLM 01529cf).
type mooncakeStore struct {
	core.NoConnector
	host  *proto.Host
	store *proto.Store

	mu                 sync.Mutex
	puts, gets         int64 // blocks
	bytesPut, bytesGot int64
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	seed := h.Extra["hash_seed"]
	if prefix := h.Extra["cache_prefix"]; prefix != "" {
		seed = prefix + "@" + seed
	}
	store, err := proto.OpenStore(h, h.Extra["store"], seed)
	if err != nil {
		return nil, err
	}
	return &mooncakeStore{host: h, store: store}, nil
}

func (c *mooncakeStore) Begin(r *core.Generation) core.Transfer {
	role := c.host.Role
	return &pooled{c: c, puts: role != proto.RoleConsumer, gets: role != proto.RoleProducer && !r.Local}
}

// Metrics are those that the connector adds to the page.
func (c *mooncakeStore) Metrics(p *metrics.Page) {
	c.mu.Lock()
	defer c.mu.Unlock()
	const get, put = `,operation="load_get",status="ok"`, `,operation="save_put",status="ok"`
	if c.gets+c.puts == 0 {
		return // labels appear with the first operation
	}
	p.Family("mooncake_store_operation_keys_total", "counter", metrics.Sample{After: get, Value: float64(c.gets)},
		metrics.Sample{After: put, Value: float64(c.puts)})
	p.Family("mooncake_store_operation_bytes_total", "counter", metrics.Sample{After: get, Value: float64(c.bytesGot)},
		metrics.Sample{After: put, Value: float64(c.bytesPut)})
}

// pooled is one request's side.
type pooled struct {
	core.NoTransfer
	c          *mooncakeStore
	puts, gets bool
	upto       int // tokens that the pool holds
}

func (t *pooled) External() bool { return t.gets }

// Promised looks up the blocks that the engine itself has not: whole ones only.
func (t *pooled) Promised(s *core.Sequence) int {
	size := t.c.host.Core.BlockSize
	first, full := s.Computed/size, s.Prompt/size
	t.upto = s.Computed
	if full > first {
		t.upto = (first + t.c.store.Has(s.Keys[first:full])) * size
	}
	return t.upto
}

func (t *pooled) Load(_ context.Context, s *core.Sequence) error {
	blocks, err := t.c.store.Load(t.c.host.Core, s, t.upto)
	if err != nil {
		return &core.LoadError{Err: err}
	}
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	t.c.gets += int64(blocks)
	t.c.bytesGot += int64(blocks * t.c.host.Core.BlockBytes)
	return nil
}

// Prefilled puts the prompt's whole blocks. With the real engine that may end after P's response.
func (t *pooled) Prefilled(_ context.Context, s *core.Sequence) {
	if !t.puts {
		return
	}
	h := t.c.host
	full := s.Prompt / h.Core.BlockSize
	contents := h.Core.Read(s.Blocks[:full])
	for i, key := range s.Keys[:full] {
		if t.c.store.Has([]core.TokenKey{key}) == 1 || t.c.store.Put(key, contents[i]) != nil {
			continue
		}
		t.c.mu.Lock()
		t.c.puts++
		t.c.bytesPut += int64(len(contents[i]))
		t.c.mu.Unlock()
	}
}
