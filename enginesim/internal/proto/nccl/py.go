// SPDX-License-Identifier: Apache-2.0

package nccl

import (
	"context"
	"fmt"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

// pyNCCL is one engine of a group of two. P inserts each prompt's KV into a lookup buffer under its tokens. D waits
// until it is there, and takes it out. It follows kv_transfer/kv_lookup_buffer/simple_buffer.py before its removal. As
// there, D asks for a prompt even if its own cache has it.
//
// Config.Extra, of the kv_consumer: kv_ip and kv_port (the kv_producer's side channel, in place of the NCCL group's
// address).
type pyNCCL struct {
	*proto.Wire
	peer proto.Place

	mu    sync.Mutex
	count map[core.TokenKey]int // how often a prompt was inserted, or asked for
}

// StartPy starts the PyNcclConnector of an engine.
func StartPy(h *proto.Host) (core.Connector, error) {
	w, err := proto.StartWire(h.Settings(), proto.Options{Writes: h.Role != proto.RoleConsumer})
	if err != nil {
		return nil, err
	}
	return &pyNCCL{Wire: w, peer: proto.Place{Host: h.Extra["kv_ip"], Port: h.Extra["kv_port"]},
		count: map[core.TokenKey]int{}}, nil
}

func (c *pyNCCL) Begin(*core.Generation) core.Transfer {
	return &dropSelect{c: c, inserts: c.Host.Role != proto.RoleConsumer}
}

// entry names a prompt's next entry in the buffer: equal prompts have one each.
func (c *pyNCCL) entry(s *core.Sequence) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	key := core.KeyOf(s.Tokens[:s.Prompt])
	c.count[key]++
	return fmt.Sprintf("%x-%x/%d", key[0], key[1], c.count[key])
}

// dropSelect is one request's side.
type dropSelect struct {
	core.NoTransfer
	c       *pyNCCL
	inserts bool
}

func (t *dropSelect) External() bool { return !t.inserts }
func (t *dropSelect) Load(ctx context.Context, s *core.Sequence) error {
	return t.c.ReadNamed(ctx, s, t.c.peer, t.c.entry(s))
}

func (t *dropSelect) Finished(s *core.Sequence, reason string) any {
	if t.inserts && proto.Ended(reason) {
		t.c.Offer(s, t.c.entry(s))
	}
	return nil
}
