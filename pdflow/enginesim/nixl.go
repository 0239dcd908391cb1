// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

// nixl is the pull connector: the prefill engine pins its blocks and hands their
// ids to the client, the decode engine reads them. Behaviour, metrics and faults
// are those of vLLM 0.32.0's NixlConnector as recorded (captures 01 to 61).
type nixl struct {
	*wire

	turns  turnConfig
	pulls  sync.Mutex
	active map[*pull]struct{} // loads still to come, for heartbeats
}

func (c *nixl) metrics(p *page) { c.core.writeTransfers(p) }

// begin decides by the two flags alone, as the engine does.
func (c *nixl) begin(r *kvRequest) transfer {
	t := &pull{nixl: c, request: r, produces: r.params.is("do_remote_decode")}
	switch {
	case r.local:
	case r.params.is("do_remote_prefill"):
		t.pulls = true
	case t.produces && c.turns.on && r.params.given("remote_block_ids") && addressed(r.params):
		t.pulls, t.turn = true, true
	case t.produces && r.params.given("remote_block_ids"):
		// A decode handoff sent back with its flags swapped looks like a second
		// turn whose KV lies on the other engine, and waits for ever (capture 39).
		t.pulls, t.swapped = true, true
	}
	if t.pulls {
		c.track(t)
	}
	return t
}

func (c *nixl) track(t *pull) {
	c.pulls.Lock()
	defer c.pulls.Unlock()
	c.active[t] = struct{}{}
}

func startNIXL(h *host) (connector, error) {
	c, err := startPull(h, false)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// startPull starts the connector. writes says that the prefill engine moves the bytes.
func startPull(h *host, writes bool) (*nixl, error) {
	set := h.settings()
	turns := turnsOf(set)
	if err := set.err(); err != nil {
		return nil, err
	}
	w, err := startWire(h, wireOptions{writes: writes})
	if err != nil {
		return nil, err
	}
	c := &nixl{wire: w, turns: turns, active: map[*pull]struct{}{}}
	c.spawn(c.heartbeats)
	return c, nil
}

func (c *nixl) done(t *pull) {
	c.pulls.Lock()
	delete(c.active, t)
	c.pulls.Unlock()
}

// rejected releases what the other engine pins: a request that the API refuses
// consumes its handoff (capture 25).
func (c *nixl) rejected(ctx context.Context, params kvParams) {
	if params.is("do_remote_prefill") {
		c.letGoOf(ctx, params)
	}
}

// letGoOf tells the other engine that nobody will read a handoff.
func (c *nixl) letGoOf(ctx context.Context, params kvParams) {
	if !addressed(params) {
		return
	}
	if p, err := c.connect(ctx, remote(params)); err == nil {
		_ = p.release(ctx, requestMessage{Request: params.text("remote_request_id")})
	}
}

// heartbeats keeps the leases of handoffs alive whose requests wait here.
func (c *nixl) heartbeats() {
	tick := time.NewTicker(max(c.host.core.lease()/6, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-tick.C:
		}
		if c.host.frozen() {
			continue
		}
		c.pulls.Lock()
		waiting := make([]*pull, 0, len(c.active))
		for t := range c.active {
			waiting = append(waiting, t)
		}
		c.pulls.Unlock()
		for _, t := range waiting {
			c.spawn(t.heartbeat)
		}
	}
}

// pull is one request's side of the connector, on either engine.
type pull struct {
	nixl     *nixl
	request  *kvRequest
	pulls    bool // the prompt's KV is to come from elsewhere
	swapped  bool
	turn     bool // it comes from the decode engine of the last turn,
	upto     int  // up to this token
	beating  atomic.Bool
	produces bool // the prompt's KV is to be handed off
}

func (t *pull) external() bool { return t.pulls }

func (t *pull) reported() (int, bool) {
	var n int
	if !t.pulls || !t.request.params.given("remote_prefill_cached_tokens") {
		return 0, false
	}
	err := json.Unmarshal(t.request.params["remote_prefill_cached_tokens"], &n)
	return n, err == nil
}

// queued sends the first heartbeat at once: the lease must not end while the
// request stands in line.
func (t *pull) queued() {
	if t.pulls && !t.swapped && !t.turn {
		t.nixl.spawn(t.heartbeat)
	}
}

// heartbeat extends the lease of the handoff. One at a time: the first may have
// to find the other engine.
func (t *pull) heartbeat() {
	params := t.request.params
	if t.swapped || t.turn || !addressed(params) || !params.given("tp_size") || !t.beating.CompareAndSwap(false, true) {
		return
	}
	defer t.beating.Store(false)
	if p, err := t.nixl.connect(t.nixl.ctx, remote(params)); err == nil {
		p.heartbeat(params.text("remote_request_id"))
	}
}

// dropped gives up a handoff that was not read: the other engine may let go.
func (t *pull) dropped(release bool) {
	if !t.pulls {
		return
	}
	t.nixl.done(t)
	if !release || t.swapped || t.nixl.silenced() {
		return
	}
	ctx, stop := context.WithTimeout(t.nixl.ctx, time.Second)
	defer stop()
	t.nixl.letGoOf(ctx, t.request.params)
}

// load reads the missing blocks. What is wrong with a handoff shows here, and in
// the engine's own ways: captures/README.md 2.1.
func (t *pull) load(ctx context.Context, s *sequence) error {
	defer t.nixl.done(t)
	params := t.request.params
	if t.swapped {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	first := s.computed / t.nixl.core.blockSize
	ids, ok := blockIDs(params["remote_block_ids"])
	upto := s.prompt
	if t.turn {
		upto = t.upto
		ids, ok = t.turnBlocks(s)
	}
	need := blocksFor(upto, t.nixl.core.blockSize) - first
	if !ok || len(ids) < need {
		return &engineDeath{"handoff has not the blocks the prompt needs"}
	}
	// The last ones: the first are taken for known here.
	ids = ids[len(ids)-need:]
	if !addressed(params) {
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
			return cause
		}
		return &engineDeath{"abort of a request whose handoff names no engine"}
	}
	p, err := t.nixl.connect(ctx, remote(params))
	if err != nil {
		return err
	}
	if t.turn && t.expired() {
		return &loadError{err: errExpired}
	}
	request := params.text("remote_request_id")
	if err := t.nixl.fetch(ctx, p, s, upto, askMessage{Request: request, Blocks: ids}); err != nil {
		return err
	}
	if p.release(ctx, requestMessage{Request: request}) != nil {
		t.nixl.host.core.stats.add(&t.nixl.host.core.stats.FailedNotifications, 1)
	}
	return nil
}

// handoff is the kv_transfer_params of vLLM 0.32.0, with its 14 keys in order.
type handoff struct {
	DoRemotePrefill  bool      `json:"do_remote_prefill"`
	DoRemoteDecode   bool      `json:"do_remote_decode"`
	BlockIDs         [][]int32 `json:"remote_block_ids"`
	EngineID         string    `json:"remote_engine_id"`
	RequestID        string    `json:"remote_request_id"`
	Host             string    `json:"remote_host"`
	Port             int       `json:"remote_port"`
	TPSize           int       `json:"tp_size"`
	DCPSize          int       `json:"dcp_size"`
	PPSize           int       `json:"pp_size"`
	NumTokens        int       `json:"remote_num_tokens"`
	BlocksExpiryTime *float64  `json:"remote_blocks_expiry_time"`
	TransferMode     string    `json:"transfer_mode"`
	// PrefillCached is left out when more than the prompt was computed (capture 21).
	PrefillCached *int `json:"remote_prefill_cached_tokens,omitempty"`
}

func (t *pull) finished(s *sequence, reason string) any {
	switch {
	case reason != reasonLength && reason != reasonStop:
		return nil
	case !t.produces && t.pulls && t.nixl.turns.on:
		return t.kept(s)
	case !t.produces:
		return nil
	}
	host, port := t.nixl.side.address()
	h := &handoff{
		DoRemotePrefill: true, EngineID: t.nixl.host.id, RequestID: s.id, Host: host, Port: port,
		TPSize: 1, DCPSize: 1, PPSize: 1, NumTokens: s.computed, TransferMode: "pull",
	}
	if s.computed == s.prompt {
		cached := s.cached
		h.PrefillCached = &cached
	}
	blocks := t.nixl.core.pin(s, KeyOf(s.tokens[:s.prompt]))
	h.BlockIDs = [][]int32{blocks[:blocksFor(h.NumTokens, t.nixl.core.blockSize)]}
	return h
}
