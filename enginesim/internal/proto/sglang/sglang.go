// SPDX-License-Identifier: Apache-2.0

// Package sglang is SGLang's disaggregation: both legs come at once, with the address of P's bootstrap server and a
// room in which they find each other. The roles are SGLang's modes: kv_producer is prefill, kv_consumer decode, and
// kv_both an engine without disaggregation, to which rooms mean nothing.
//
// It reads these of Config.Extra: disaggregation_bootstrap_port (a free port by default), dp_size, load_balance_method
// (of P: round_robin, or follow_bootstrap_room, which is the default), enable_metrics ("1": GET /metrics is there),
// pd_routing_fields ("0": /v1/responses and /v1/messages do not read bootstrap members, as before 0.5.20 and 0.5.22),
// SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT and SGLANG_DISAGGREGATION_WAITING_TIMEOUT (seconds, 300).
package sglang

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

// sglangDisagg is one engine's side. See docs/protocols/sglang.md.
//
//   - P waits in the room before it computes (PrefillBootstrapQueue), so its response comes only once D is there, or is
//     an error after the time-out;
//   - D finds P's rank at the bootstrap server, and waits in the room until P sends or D's own time-out ends: nobody
//     tells D that P has failed (sglang#9726);
//   - a room that lives at an engine cannot be entered again: P rejects a second receiver, and a second prefill request
//     is the crash of sglang#40125;
//   - a room that has been used stays closed;
//   - P makes one token, whatever the limit, and gives it to D with the KV;
//   - n above 1 never works: see withRooms.
type sglangDisagg struct {
	*proto.Wire
	*proto.Bootstrap // nil but on P
	ranks            uint64
	patience         time.Duration // P waits for D
	waiting          time.Duration // D waits for P
	client           *http.Client

	mu    sync.Mutex
	turn  uint64 // of requests that named no rank, with round_robin
	rooms map[string]*sglangRoom
	used  map[string]sglangAux
	order []string // of used rooms
}

// sglangRoom is a room at P, from whoever comes first until P's request ends.
type sglangRoom struct {
	live    bool          // P's request is there
	entered bool          // D's is
	asked   chan struct{} // closed when D comes
	left    chan struct{} // closed when D leaves before it has the KV
}

// sglangAux is what travels with the KV (MetadataBuffers).
type sglangAux struct {
	First  int32 `json:"first"`
	Cached int   `json:"cached"`
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	const portSetting = "disaggregation_bootstrap_port"
	set := h.Settings()
	port := set.Count(portSetting, 0)
	c := &sglangDisagg{
		patience: set.Seconds("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", 300),
		waiting:  set.Seconds("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", 300),
		ranks:    max(1, uint64(set.Count("dp_size", 1))),
		rooms:    map[string]*sglangRoom{}, used: map[string]sglangAux{}, client: proto.NewClient(),
	}
	var err error
	if c.Wire, err = proto.StartWire(set, proto.Options{Writes: true, Named: c.enter, Left: c.leave}); err != nil {
		return nil, err
	}
	if h.Role == proto.RoleProducer {
		if c.Bootstrap, err = proto.ListenBootstrap(h, portSetting, port, c.serveBootstrap); err != nil {
			c.Wire.Close()
			return nil, err
		}
	}
	return c, nil
}

func (c *sglangDisagg) Close() {
	c.Bootstrap.Close()
	c.Wire.Close()
}

// disaggregated reports whether the engine refuses requests without a room.
func (c *sglangDisagg) disaggregated() bool { return c.Host.Role != proto.RoleBoth }

func (c *sglangDisagg) Begin(r *core.Generation) core.Transfer {
	if !c.disaggregated() {
		return core.NoTransfer{}
	}
	if r.Params["bootstrap_room"] == nil {
		return core.NoTransfer{} // P's, with n above 1
	}
	// The API has checked that it is a number.
	room, _ := strconv.ParseUint(string(r.Params["bootstrap_room"]), 10, 64)
	t := &sglangTransfer{c: c, params: r.Params, room: room, pulls: c.Host.Role == proto.RoleConsumer}
	if !t.pulls {
		rank := c.balance(room)
		for _, name := range []string{"routed_dp_rank", "data_parallel_rank"} {
			if n, err := strconv.ParseUint(string(r.Params[name]), 10, 32); err == nil {
				rank = n
			}
		}
		t.name = roomName(room, rank)
	}
	return t
}

// follows reports whether P's rank follows from the room.
func (c *sglangDisagg) follows() bool { return c.Host.Extra["load_balance_method"] != "round_robin" }

// balance chooses P's rank for a request that names none (managers/data_parallel_controller.py). The first one gets
// rank 1, as after a warm-up, so that a gateway that counts from 0 does not guess right.
func (c *sglangDisagg) balance(room uint64) uint64 {
	if c.follows() {
		return room % c.ranks
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.turn++
	return c.turn % c.ranks
}

// roomName is a room at one rank of P: at another nobody knows it.
func roomName(room, rank uint64) string {
	return strconv.FormatUint(room, 10) + "@" + strconv.FormatUint(rank, 10)
}

// room returns a room at P. The first request that asks for it makes it. The caller holds the lock.
func (c *sglangDisagg) room(name string) *sglangRoom {
	r := c.rooms[name]
	if r == nil {
		r = &sglangRoom{asked: make(chan struct{}), left: make(chan struct{})}
		c.rooms[name] = r
	}
	return r
}

// enter serves D: it waits until P sends. It rejects a second receiver, and one in a room that has been used.
func (c *sglangDisagg) enter(pipe *core.Pipe, f core.Frame, m proto.AskMessage) {
	c.mu.Lock()
	_, used := c.used[m.Name]
	r := c.room(m.Name)
	rejected := used || r.entered
	if !rejected {
		r.entered = true
		close(r.asked)
	}
	c.mu.Unlock()
	if rejected {
		proto.Refuse(pipe, f)
		return
	}
	c.Side.GiveOffered(pipe, f, m)
}

// leave is D's [ABORT, room].
func (c *sglangDisagg) leave(name string) {
	c.mu.Lock()
	if r := c.rooms[name]; r != nil {
		select {
		case <-r.left:
		default:
			close(r.left)
		}
		if !r.live {
			delete(c.rooms, name)
		}
	}
	c.mu.Unlock()
	c.Side.Forget(name)
}

// closeRoom makes a room unusable: P's request has ended.
func (c *sglangDisagg) closeRoom(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.rooms, name)
	if _, there := c.used[name]; !there {
		c.keepUsed(name, sglangAux{})
	}
}

// keepUsed remembers what is known of a used room. The caller holds the lock.
func (c *sglangDisagg) keepUsed(name string, aux sglangAux) {
	c.used[name] = aux
	if c.order = append(c.order, name); len(c.order) > core.LedgerLimit {
		delete(c.used, c.order[0])
		c.order = c.order[1:]
	}
}

// sglangTransfer is one sequence's side, on either engine.
type sglangTransfer struct {
	core.NoTransfer
	c      *sglangDisagg
	params core.Params
	room   uint64
	name   string // of the room; on D not before P's ranks are known
	pulls  bool
	aux    *sglangAux // on D, with the KV
}

func (t *sglangTransfer) External() bool { return t.pulls }

// Reported is P's own prefix cache hit: D's usage tells it.
func (t *sglangTransfer) Reported() (int, bool) {
	if t.aux == nil {
		return 0, false
	}
	return t.aux.Cached, true
}

// Told is the token that P has made.
func (t *sglangTransfer) Told() []int32 {
	if t.aux == nil {
		return nil
	}
	return []int32{t.aux.First}
}

var (
	errNobodyCame = errors.New("timed out when bootstrapping")
	errAborted    = errors.New("the decode engine aborted the room")
	errUsedRoom   = errors.New("the room has been used")
	errNoRoute    = errors.New("no prefill server info")
)

// Arrived lets P wait for D.
func (t *sglangTransfer) Arrived(ctx context.Context, _ *core.Sequence) (string, error) {
	if t.pulls {
		return "", nil
	}
	c := t.c
	c.mu.Lock()
	_, used := c.used[t.name]
	r := c.room(t.name)
	crash := r.live
	r.live = true
	c.mu.Unlock()
	switch {
	case crash:
		return "", &core.Death{Why: "two live requests in one room"}
	case used:
		return "", &core.LoadError{Err: errUsedRoom}
	}
	context.AfterFunc(ctx, func() { c.closeRoom(t.name) })
	late := time.NewTimer(c.patience)
	defer late.Stop()
	select {
	case <-r.asked:
		return "", nil
	case <-r.left:
		return "", &core.LoadError{Err: errAborted}
	case <-late.C:
		return "", &core.LoadError{Err: errNobodyCame}
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// Finished sends P's KV to D, which is waiting for it.
func (t *sglangTransfer) Finished(s *core.Sequence, _ string) any {
	if t.pulls {
		return nil
	}
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	r := t.c.rooms[t.name]
	if r == nil || len(s.Output) == 0 {
		return nil
	}
	select {
	case <-r.left:
		return nil
	default:
	}
	t.c.keepUsed(t.name, sglangAux{First: s.Output[0], Cached: s.Cached})
	t.c.Offer(s, t.name)
	return nil
}

// Load is D's: it finds P, and waits in the room.
func (t *sglangTransfer) Load(ctx context.Context, s *core.Sequence) error {
	ctx, stop := context.WithTimeoutCause(ctx, t.c.waiting, proto.ErrNothing)
	defer stop()
	port := string(t.params["bootstrap_port"])
	if port == "" || port == "null" {
		port = "8998"
	}
	// Put together as the engine does, so that an IPv6 address must have brackets.
	address := t.params.Text("bootstrap_host") + ":" + port
	to, rank, err := t.c.find(ctx, address, t.room, t.params)
	if err == nil {
		t.name = roomName(t.room, rank)
		err = t.c.ReadNamed(ctx, s, to, t.name)
	}
	if err == nil {
		var aux sglangAux
		if err = t.c.ask(ctx, address, "/sim/aux?room="+t.name, &aux); err == nil {
			t.aux = &aux
			return nil
		}
	}
	if errors.Is(err, proto.ErrNothing) {
		return &core.LoadError{Failures: 1, Err: err}
	}
	return err
}

// find asks P's bootstrap server for its sizes and for a rank's address, until HandshakeTimeout.
func (c *sglangDisagg) find(ctx context.Context, address string, room uint64, params core.Params) (to proto.Place,
	rank uint64, err error) {
	limit, stop := context.WithTimeoutCause(ctx, c.Host.Handshake, proto.ErrHandshake)
	defer stop()
	var sizes sglangSizes
	for c.ask(limit, address, "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1",
		&sizes) != nil || sizes.Ranks == 0 {
		if err = core.Sleep(limit, 20*time.Millisecond); err != nil {
			if errors.Is(err, proto.ErrHandshake) {
				err = &core.LoadError{Failures: 1, Err: errNoRoute}
			}
			return to, 0, err
		}
	}
	rank = room % sizes.Ranks
	if n, err := strconv.ParseUint(string(params["disagg_prefill_dp_rank"]), 10, 32); err == nil {
		rank = n
	}
	var at struct {
		Host string `json:"rank_ip"`
		Port int    `json:"rank_port"`
	}
	if err = c.ask(limit, address, "/route?prefill_dp_rank="+strconv.FormatUint(rank,
		10)+"&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", &at); err != nil {
		return to, 0, &core.LoadError{Failures: 1, Err: errNoRoute}
	}
	return proto.Place{Host: at.Host, Port: strconv.Itoa(at.Port)}, rank, nil
}

// ask reads a JSON response of P's bootstrap server.
func (c *sglangDisagg) ask(ctx context.Context, address, path string, v any) error {
	err := proto.GetJSON(ctx, c.client, "http://"+address+path, v)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return errNoRoute
}
