// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"fmt"
	"sync"
)

// pyNCCL is one engine of a group of two: P inserts each prompt's KV into a lookup
// buffer under its tokens, D drops it there, once, and waits until it is there. It
// follows kv_transfer/kv_lookup_buffer/simple_buffer.py before its removal. As there,
// the engine's cache of its own plays no part in what D asks for.
//
// Config.Extra, of the kv_consumer: kv_ip and kv_port (the kv_producer's
// [Engine.SideChannel], in place of the NCCL group's address).
type pyNCCL struct {
	*wire
	peer place

	mu    sync.Mutex
	count map[TokenKey]int // how often a prompt was inserted, or asked for
}

func startPyNCCL(h *host) (connector, error) {
	w, err := startWire(h, wireOptions{writes: h.role != roleConsumer})
	if err != nil {
		return nil, err
	}
	return &pyNCCL{wire: w, peer: place{host: h.extra["kv_ip"], port: h.extra["kv_port"]}, count: map[TokenKey]int{}}, nil
}

func (c *pyNCCL) begin(*kvRequest) transfer {
	return &dropSelect{c: c, inserts: c.host.role != roleConsumer}
}

// entry names a prompt's next entry in the buffer: equal prompts have one each.
func (c *pyNCCL) entry(s *sequence) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := KeyOf(s.tokens[:s.prompt])
	c.count[key]++
	return fmt.Sprintf("%x-%x/%d", key[0], key[1], c.count[key])
}

// dropSelect is one request's side.
type dropSelect struct {
	noTransfer
	c       *pyNCCL
	inserts bool
}

func (t *dropSelect) external() bool { return !t.inserts }
func (t *dropSelect) load(ctx context.Context, s *sequence) error {
	return t.c.readNamed(ctx, s, t.c.peer, t.c.entry(s))
}

func (t *dropSelect) finished(s *sequence, reason string) any {
	if t.inserts && (reason == reasonLength || reason == reasonStop) {
		t.c.offer(s, t.c.entry(s))
	}
	return nil
}
