// SPDX-License-Identifier: Apache-2.0

// Package mooncake is vLLM's MooncakeConnector. D asks P for a transfer id that both legs were given, and P writes once
// it has finished the prompt by length.
//
// It reads these of Config.Extra: VLLM_MOONCAKE_BOOTSTRAP_PORT (of the bootstrap server; a free port by default),
// VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (seconds, 480), num_workers (10) and data_parallel_size (1).
package mooncake

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

// mooncake is one engine's side. Behaviour and faults are those of vLLM 0.32.0 as recorded
// (docs/protocols/mooncake.md); what was not recorded follows mooncake_connector.py.
type mooncake struct {
	*proto.Wire
	*proto.Bootstrap // nil on a kv_consumer
	ranks            int
	patience         time.Duration // how long P keeps blocks, and waits for a prompt
	senders          chan struct{} // holds one item per sender's task that is at work
	next             atomic.Uint64 // of requests that name no rank
	client           *http.Client

	mu      sync.Mutex
	workers map[string]proto.Place   // by engine id; never asked for twice, as in D
	asking  map[string]chan struct{} // by bootstrap address: holds one item while somebody asks
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	port := set.Count("VLLM_MOONCAKE_BOOTSTRAP_PORT", 0)
	c := &mooncake{
		patience: set.Seconds("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480),
		ranks:    max(1, set.Count("data_parallel_size", 1)),
		// An orphan with num_workers 2 stopped every later pair, and one with 10 stopped none (recordings 17, 18). P's
		// log names two waits for each orphan: the read, and the empty read of its abort. So many tasks fit that,
		// whatever the sources start.
		senders: make(chan struct{}, max(1, set.Count("num_workers", 10))),
		workers: map[string]proto.Place{}, asking: map[string]chan struct{}{}, client: proto.NewClient(),
	}
	var err error
	if c.Wire, err = proto.StartWire(set, proto.Options{Writes: true, Named: c.asked, Left: c.left,
		Lease: c.patience}); err != nil {
		return nil, err
	}
	if h.Role != proto.RoleConsumer {
		if c.Bootstrap, err = proto.ListenBootstrap(h, "VLLM_MOONCAKE_BOOTSTRAP_PORT", port,
			c.answerQuery); err != nil {
			c.Wire.Close()
			return nil, err
		}
	}
	return c, nil
}

func (c *mooncake) Close() {
	c.Bootstrap.Close()
	c.Wire.Close()
}

// engine is a rank's engine id: with several ranks each has its own.
func (c *mooncake) engine(rank int) string {
	if c.ranks == 1 {
		return c.Host.ID
	}
	return c.Host.ID + "_dp" + strconv.Itoa(rank)
}

// nameOf is a transfer id at one rank of an engine: at another nobody knows it.
func nameOf(engine, id string) string {
	_, rank, _ := strings.Cut(engine, "_dp")
	return id + "@" + rank
}

func (c *mooncake) Begin(r *core.Generation) core.Transfer {
	t := &write{Legs: proto.LegsOf(r), c: c, id: r.Params.Text("transfer_id")}
	if t.Produces = t.Produces && !t.Pulls; t.Produces {
		t.rank = c.rankFor(r)
	}
	return t
}

// rankFor is the data-parallel rank that serves a request: the one that the header names, else the next in turn.
func (c *mooncake) rankFor(r *core.Generation) int {
	if n, ok := proto.RankOf(r, c.ranks); ok {
		return n
	}
	return int(c.next.Add(1) % uint64(c.ranks))
}

// needed are the keys without which D warns and waits, and dies when the client leaves (docs/protocols/mooncake.md,
// recording 15).
var needed = []string{"remote_engine_id", "remote_bootstrap_addr", "transfer_id"}

func missing(params core.Params) bool { return proto.Missing(params, needed...) != "" }

// Rejected lets P go, as D does for a request that its API refused: it asks P for no block.
func (c *mooncake) Rejected(ctx context.Context, params core.Params) {
	if !params.Is("do_remote_prefill") || params.Text("transfer_id") == "" {
		return
	}
	if missing(params) {
		c.Core.Die()
		return
	}
	to, err := c.find(ctx, params.Text("remote_bootstrap_addr"), params.Text("remote_engine_id"))
	if err == nil {
		name := nameOf(params.Text("remote_engine_id"), params.Text("transfer_id"))
		c.Briefly(func(ctx context.Context) { c.LetGo(ctx, to, proto.RequestMessage{Name: name}) })
	}
}

var (
	errNoBootstrap   = errors.New("no bootstrap server answers")
	errUnknownEngine = errors.New("remote engine id not found from bootstrap server")
)

// find returns where an engine's workers listen. One request asks the bootstrap server; the others wait for it.
func (c *mooncake) find(ctx context.Context, bootstrap, engine string) (proto.Place, error) {
	c.mu.Lock()
	busy := c.asking[bootstrap]
	if busy == nil {
		busy = make(chan struct{}, 1)
		c.asking[bootstrap] = busy
	}
	c.mu.Unlock()
	select {
	case busy <- struct{}{}:
		defer func() { <-busy }()
	case <-ctx.Done():
		return proto.Place{}, context.Cause(ctx)
	}
	c.mu.Lock()
	to, ok := c.workers[engine]
	c.mu.Unlock()
	if ok {
		return to, nil
	}
	return c.query(ctx, bootstrap, engine)
}

func (c *mooncake) query(ctx context.Context, bootstrap, engine string) (proto.Place, error) {
	var ranks map[string]rank
	if err := proto.GetJSON(ctx, c.client, bootstrap+"/query", &ranks); err != nil {
		return proto.Place{}, errNoBootstrap
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rank := range ranks {
		host, port, err := net.SplitHostPort(strings.TrimPrefix(rank.Workers["0"]["0"], "tcp://"))
		if err != nil {
			continue
		}
		id, _, _ := strings.Cut(rank.EngineID, "_dp")
		c.workers[rank.EngineID] = proto.Place{ID: id, Host: host, Port: port}
	}
	to, ok := c.workers[engine]
	if !ok {
		return proto.Place{}, &core.LoadError{Err: errUnknownEngine}
	}
	return to, nil
}

// asked is P's sender: one of a few tasks serves a read, and waits for the prompt even if the reader leaves.
func (c *mooncake) asked(pipe *core.Pipe, f core.Frame, m proto.AskMessage) {
	if !c.take() {
		return
	}
	defer func() { <-c.senders }()
	request, ready, over := c.ready(m.Name)
	switch {
	case ready:
		c.Side.GiveNamed(pipe, f, m, request)
	case !over: // "Timeout waiting for P side ready": D's load has failed (19)
		proto.Refuse(pipe, f)
	}
}

// left serves the empty read that D sends for an aborted request: a task waits for the blocks and lets go of them.
func (c *mooncake) left(name string) {
	c.Spawn(func() {
		if !c.take() {
			return
		}
		defer func() { <-c.senders }()
		if _, ready, _ := c.ready(name); !ready {
			return
		}
		c.Side.Forget(name)
	})
}

func (c *mooncake) take() bool {
	select {
	case c.senders <- struct{}{}:
		return true
	case <-c.Side.Gate.Ended:
		return false
	}
}

// ready waits until a name is offered. over says that the engine has ended.
func (c *mooncake) ready(name string) (request string, ready, over bool) {
	late := time.NewTimer(c.patience)
	defer late.Stop()
	for {
		request, soon := c.Side.Offers.Get(name)
		if soon == nil {
			return request, true, false
		}
		select {
		case <-soon: // offered, or its reader has left, which ends nothing here
		case <-late.C:
			return "", false, false
		case <-c.Side.Gate.Ended:
			return "", false, true
		}
	}
}

// write is one request's side, on either engine.
type write struct {
	proto.Legs
	c    *mooncake
	id   string
	rank int
}

// Arrived holds vLLM's assertions: the roles are kept, or the engine core dies.
func (t *write) Arrived(context.Context, *core.Sequence) (string, error) {
	role := t.c.Host.Role
	switch {
	case t.Pulls && role == proto.RoleProducer:
		return "", &core.Death{Why: "do_remote_prefill on a kv_producer"}
	case t.Produces && role == proto.RoleConsumer:
		return "", &core.Death{Why: "do_remote_decode on a kv_consumer"}
	}
	return "", nil
}

func (t *write) Dropped(release bool) {
	if t.Pulls && release {
		t.c.Briefly(func(ctx context.Context) { t.c.Rejected(ctx, t.Request.Params) })
	}
}

// Load asks P, and waits. It fails at once in two cases only: the bootstrap server does not know the engine id, or P
// says that it has waited too long. In all others D waits.
func (t *write) Load(ctx context.Context, s *core.Sequence) error {
	params := t.Request.Params
	if missing(params) {
		cause := proto.Hang(ctx)
		if !errors.Is(cause, context.Canceled) || !params.Has("transfer_id") {
			return cause
		}
		return &core.Death{Why: "KeyError in the abort of a request without an engine id"}
	}
	engine := params.Text("remote_engine_id")
	to, err := t.c.find(ctx, params.Text("remote_bootstrap_addr"), engine)
	var p *proto.Peer
	if err == nil {
		p, err = t.c.Connect(ctx, to)
	}
	switch {
	case err == nil:
		err = t.c.ReadNamedOf(ctx, p, s, nameOf(engine, t.id))
	case ctx.Err() != nil:
		t.askLate(ctx, core.KeyOf(s.Tokens[:s.Prompt]))
	}
	var failed *core.LoadError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errUnknownEngine), errors.Is(err, proto.ErrOutOfRange):
		return err
	case !errors.As(err, &failed) && !errors.Is(err, errNoBootstrap):
		return err
	}
	// P is gone, or nobody listens at the bootstrap address (10, 16).
	silence := time.NewTimer(t.c.patience + time.Minute)
	defer silence.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-silence.C:
		return &core.LoadError{Err: err}
	}
}

// askLate asks P for a request whose client left before D had found P: D's worker does not know that it left, and only
// then comes the empty read of the abort. left has ended.
func (t *write) askLate(left context.Context, prompt core.TokenKey) {
	engine := t.Request.Params.Text("remote_engine_id")
	if t.c.Silenced() {
		return
	}
	t.c.Spawn(func() {
		ctx, stop := context.WithTimeout(t.c.Ctx, t.c.patience)
		defer stop()
		to, err := t.c.find(ctx, t.Request.Params.Text("remote_bootstrap_addr"), engine)
		if err != nil {
			return
		}
		if p, err := t.c.Connect(ctx, to); err == nil {
			_, _ = p.Ask(left, prompt, proto.AskMessage{Name: nameOf(engine, t.id), Count: 1})
		}
	})
}

// Finished offers the prompt's KV, if the response ended by length. Else P frees the blocks, and a reader that asks for
// them waits (recording 08).
func (t *write) Finished(s *core.Sequence, reason string) any {
	if t.Produces && t.id != "" && reason == core.ReasonLength {
		t.c.Offer(s, nameOf(t.c.engine(t.rank), t.id))
	}
	return nil
}
