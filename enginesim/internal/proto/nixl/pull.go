// SPDX-License-Identifier: Apache-2.0

// Package nixl is vLLM's NIXL connectors: pull, in which D reads P's blocks, and push, in which P writes them.
package nixl

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/metrics"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// Connector is the pull connector: the prefill engine pins its blocks and hands their ids to the client, the decode
// engine reads them. Behaviour, metrics and faults are those of vLLM 0.32.0's NixlConnector as recorded
// (docs/protocols/nixl.md).
type Connector struct {
	*proto.Wire

	turns  turnConfig
	pulls  sync.Mutex
	active map[*pull]struct{} // loads still to come, for heartbeats
}

// Metrics writes what NIXL adds to the /metrics page.
func (c *Connector) Metrics(p *metrics.Page) { c.Core.WriteTransfers(p) }

// Begin decides by the two flags alone, as the engine does.
func (c *Connector) Begin(r *core.Generation) core.Transfer {
	t := &pull{Legs: proto.LegsOf(r), nixl: c}
	// A decode handoff sent back with its flags swapped looks like a second turn whose KV lies on the other engine, and
	// without turns it waits forever (docs/protocols/nixl.md, recording 39).
	if !r.Local && !t.Pulls && t.Produces && r.Params.Given("remote_block_ids") {
		t.turn = c.turns.on && proto.Addressed(r.Params)
		t.Pulls, t.swapped = true, !t.turn
	}
	c.track(t)
	return t
}

// track keeps a load that is to come in mind.
func (c *Connector) track(t *pull) {
	c.pulls.Lock()
	defer c.pulls.Unlock()
	if t.Pulls {
		c.active[t] = struct{}{}
	}
}

// Start starts the pull connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	c, err := New(h, false)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// New starts the connector. writes says that the prefill engine moves the bytes.
func New(h *proto.Host, writes bool) (*Connector, error) {
	set := h.Settings()
	turns := turnsOf(set)
	w, err := proto.StartWire(set, proto.Options{Writes: writes})
	if err != nil {
		return nil, err
	}
	c := &Connector{Wire: w, turns: turns, active: map[*pull]struct{}{}}
	c.Spawn(c.heartbeats)
	return c, nil
}

func (c *Connector) done(t *pull) {
	c.pulls.Lock()
	delete(c.active, t)
	c.pulls.Unlock()
}

// Rejected releases what the other engine pins: a request that the API refuses consumes its handoff
// (docs/protocols/nixl.md, recording 25).
func (c *Connector) Rejected(ctx context.Context, params core.Params) {
	if params.Is("do_remote_prefill") {
		c.LetGoOf(ctx, params)
	}
}

// heartbeats keeps the leases of handoffs alive whose requests wait here.
func (c *Connector) heartbeats() {
	tick := time.NewTicker(max(c.Core.Lease()/6, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-c.Ctx.Done():
			return
		case <-tick.C:
		}
		if c.Host.Frozen() {
			continue
		}
		c.pulls.Lock()
		waiting := make([]*pull, 0, len(c.active))
		for t := range c.active {
			waiting = append(waiting, t)
		}
		c.pulls.Unlock()
		for _, t := range waiting {
			c.Spawn(t.heartbeat)
		}
	}
}

// pull is one request's side of the connector, on either engine.
type pull struct {
	proto.Legs
	nixl    *Connector
	swapped bool
	turn    bool // the KV comes from the decode engine of the last turn,
	upto    int  // up to this token
	beating atomic.Bool
}

func (t *pull) Reported() (int, bool) {
	var n int
	ok := t.Pulls && t.Request.Params.Read("remote_prefill_cached_tokens", &n)
	return n, ok
}

// Queued sends the first heartbeat at once: the lease must not end while the request stands in line.
func (t *pull) Queued() {
	if t.Pulls && !t.swapped && !t.turn {
		t.nixl.Spawn(t.heartbeat)
	}
}

// heartbeat extends the lease of the handoff. One runs at a time, since the first may have to connect to the other
// engine.
func (t *pull) heartbeat() {
	params := t.Request.Params
	if t.swapped || t.turn || !proto.Addressed(params) || !params.Given("tp_size") ||
		!t.beating.CompareAndSwap(false, true) {
		return
	}
	defer t.beating.Store(false)
	if p, err := t.nixl.Connect(t.nixl.Ctx, proto.Remote(params)); err == nil {
		p.Heartbeat(params.Text("remote_request_id"))
	}
}

// Dropped gives up a handoff that was not read: the other engine may let go.
func (t *pull) Dropped(release bool) {
	if !t.Pulls {
		return
	}
	t.nixl.done(t)
	if release && !t.swapped {
		t.nixl.Briefly(func(ctx context.Context) { t.nixl.LetGoOf(ctx, t.Request.Params) })
	}
}

// Load reads the missing blocks. Here a wrong handoff shows, in the ways of docs/protocols/nixl.md §3.
func (t *pull) Load(ctx context.Context, s *core.Sequence) error {
	defer t.nixl.done(t)
	params := t.Request.Params
	if t.swapped {
		return proto.Hang(ctx)
	}
	first := s.Computed / t.nixl.Core.BlockSize
	ids, ok := proto.BlockIDs(params["remote_block_ids"])
	upto := s.Prompt
	if t.turn {
		upto = t.upto
		ids, ok = t.turnBlocks(s)
	}
	need := core.BlocksFor(upto, t.nixl.Core.BlockSize) - first
	if !ok || len(ids) < need {
		return &core.Death{Why: "handoff has not the blocks the prompt needs"}
	}
	// It reads the last ones, since it takes the first for cached.
	ids = ids[len(ids)-need:]
	if !proto.Addressed(params) {
		if cause := proto.Hang(ctx); !errors.Is(cause, context.Canceled) {
			return cause
		}
		return &core.Death{Why: "abort of a request whose handoff names no engine"}
	}
	p, err := t.nixl.Connect(ctx, proto.Remote(params))
	if err != nil {
		return err
	}
	if t.turn && t.expired() {
		return &core.LoadError{Err: errExpired}
	}
	return t.nixl.Take(ctx, p, s, upto, proto.AskMessage{Request: params.Text("remote_request_id"), Blocks: ids})
}

// handoff is the kv_transfer_params of vLLM 0.32.0 for all that a sequence has computed, with their keys in order: 14
// of pull, 13 of push. The caller pins or offers its blocks. expires, of pull alone, is null for a prompt. A handoff of
// more than the prompt does not tell what was cached (docs/protocols/nixl.md, recording 21).
func (c *Connector) handoff(s *core.Sequence, mode string, expires any) python.Object {
	host, port := c.Side.Address()
	back := expires != nil // from decode to prefill
	h := python.Object{"do_remote_prefill", !back, "do_remote_decode", back,
		"remote_block_ids", [][]int32{s.Blocks[:core.BlocksFor(s.Computed, c.Core.BlockSize)]},
		"remote_engine_id", c.Host.ID, "remote_request_id", s.ID, "remote_host", host, "remote_port", port,
		"tp_size", 1, "dcp_size", 1, "pp_size", 1, "remote_num_tokens", s.Computed}
	if mode == "pull" {
		h = append(h, "remote_blocks_expiry_time", expires)
	}
	h = append(h, "transfer_mode", mode)
	if s.Computed == s.Prompt && !back {
		h = append(h, "remote_prefill_cached_tokens", s.Cached)
	}
	return h
}

func (t *pull) Finished(s *core.Sequence, reason string) any {
	switch {
	case !proto.Ended(reason):
		return nil
	case !t.Produces && t.Pulls && t.nixl.turns.on:
		return t.kept(s)
	case !t.Produces:
		return nil
	}
	h := t.nixl.handoff(s, "pull", nil)
	t.nixl.Core.Pin(s, core.KeyOf(s.Tokens[:s.Prompt]))
	return h
}
