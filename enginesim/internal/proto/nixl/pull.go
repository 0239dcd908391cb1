// SPDX-License-Identifier: Apache-2.0

// Package nixl is vLLM's NIXL connectors: pull, in which D reads P's blocks, and push, in which P writes them.
package nixl

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/metrics"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
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
func (c *Connector) Begin(r *core.Request) core.Transfer {
	t := &pull{nixl: c, request: r, produces: r.Params.Is("do_remote_decode")}
	switch {
	case r.Local:
	case r.Params.Is("do_remote_prefill"):
		t.pulls = true
	case t.produces && c.turns.on && r.Params.Given("remote_block_ids") && proto.Addressed(r.Params):
		t.pulls, t.turn = true, true
	case t.produces && r.Params.Given("remote_block_ids"):
		// A decode handoff sent back with its flags swapped looks like a second turn whose KV lies on the other engine,
		// and waits forever (docs/protocols/nixl.md, recording 39).
		t.pulls, t.swapped = true, true
	}
	if t.pulls {
		c.track(t)
	}
	return t
}

func (c *Connector) track(t *pull) {
	c.pulls.Lock()
	defer c.pulls.Unlock()
	c.active[t] = struct{}{}
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
	if err := set.Err(); err != nil {
		return nil, err
	}
	w, err := proto.StartWire(h, proto.Options{Writes: writes})
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
	nixl     *Connector
	request  *core.Request
	pulls    bool // the prompt's KV is to come from elsewhere
	swapped  bool
	turn     bool // it comes from the decode engine of the last turn,
	upto     int  // up to this token
	beating  atomic.Bool
	produces bool // the prompt's KV is to be handed off
}

func (t *pull) External() bool { return t.pulls }

func (t *pull) Reported() (int, bool) {
	var n int
	if !t.pulls || !t.request.Params.Given("remote_prefill_cached_tokens") {
		return 0, false
	}
	err := json.Unmarshal(t.request.Params["remote_prefill_cached_tokens"], &n)
	return n, err == nil
}

// Queued sends the first heartbeat at once: the lease must not end while the request stands in line.
func (t *pull) Queued() {
	if t.pulls && !t.swapped && !t.turn {
		t.nixl.Spawn(t.heartbeat)
	}
}

// heartbeat extends the lease of the handoff. One runs at a time, since the first may have to connect to the other
// engine.
func (t *pull) heartbeat() {
	params := t.request.Params
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
	if !t.pulls {
		return
	}
	t.nixl.done(t)
	if release && !t.swapped {
		t.nixl.Briefly(func(ctx context.Context) { t.nixl.LetGoOf(ctx, t.request.Params) })
	}
}

// Load reads the missing blocks. Here a wrong handoff shows, in the ways of docs/protocols/nixl.md §3.
func (t *pull) Load(ctx context.Context, s *core.Sequence) error {
	defer t.nixl.done(t)
	params := t.request.Params
	if t.swapped {
		<-ctx.Done()
		return context.Cause(ctx)
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
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
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
	request := params.Text("remote_request_id")
	if err := t.nixl.Fetch(ctx, p, s, upto, proto.AskMessage{Request: request, Blocks: ids}); err != nil {
		return err
	}
	if p.Release(ctx, proto.RequestMessage{Request: request}) != nil {
		t.nixl.Core.Stats.Add(&t.nixl.Core.Stats.FailedNotifications, 1)
	}
	return nil
}

// handoff is the kv_transfer_params of vLLM 0.32.0, with its keys in order: 14 of pull, 13 of push.
type handoff struct {
	DoRemotePrefill bool      `json:"do_remote_prefill"`
	DoRemoteDecode  bool      `json:"do_remote_decode"`
	BlockIDs        [][]int32 `json:"remote_block_ids"`
	EngineID        string    `json:"remote_engine_id"`
	RequestID       string    `json:"remote_request_id"`
	Host            string    `json:"remote_host"`
	Port            int       `json:"remote_port"`
	TPSize          int       `json:"tp_size"`
	DCPSize         int       `json:"dcp_size"`
	PPSize          int       `json:"pp_size"`
	NumTokens       int       `json:"remote_num_tokens"`
	// BlocksExpiryTime is left out by push, and null for a prompt.
	BlocksExpiryTime json.RawMessage `json:"remote_blocks_expiry_time,omitempty"`
	TransferMode     string          `json:"transfer_mode"`
	// PrefillCached is left out when more than the prompt was computed (docs/protocols/nixl.md, recording 21).
	PrefillCached *int `json:"remote_prefill_cached_tokens,omitempty"`
}

// handoff hands off all that a sequence has computed. The caller pins or offers its blocks.
func (c *Connector) handoff(s *core.Sequence, mode string) *handoff {
	host, port := c.Side.Address()
	h := &handoff{
		DoRemotePrefill: true, EngineID: c.Host.ID, RequestID: s.ID, Host: host, Port: port,
		TPSize: 1, DCPSize: 1, PPSize: 1, NumTokens: s.Computed, TransferMode: mode,
		BlockIDs: [][]int32{s.Blocks[:core.BlocksFor(s.Computed, c.Core.BlockSize)]},
	}
	if s.Computed == s.Prompt {
		cached := s.Cached
		h.PrefillCached = &cached
	}
	return h
}

func (t *pull) Finished(s *core.Sequence, reason string) any {
	switch {
	case reason != core.ReasonLength && reason != core.ReasonStop:
		return nil
	case !t.produces && t.pulls && t.nixl.turns.on:
		return t.kept(s)
	case !t.produces:
		return nil
	}
	h := t.nixl.handoff(s, "pull")
	h.BlocksExpiryTime = json.RawMessage("null")
	t.nixl.Core.Pin(s, core.KeyOf(s.Tokens[:s.Prompt]))
	return h
}
