// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// mooncake is one engine's side. Behaviour and faults are those of vLLM 0.32.0 as
// recorded (captures mooncake/00 to 19); what was not recorded follows
// mooncake_connector.py.
type mooncake struct {
	*wire
	*bootstrap // nil on a kv_consumer
	ranks      int
	patience   time.Duration // how long P keeps blocks, and waits for a prompt
	senders    chan struct{} // holds one item per sender's task that is at work
	turn       atomic.Uint64 // of requests that name no rank
	client     *http.Client

	mu      sync.Mutex
	workers map[string]place         // by engine id; never asked for twice, as in D
	asking  map[string]chan struct{} // by bootstrap address: holds one item while somebody asks
}

func startMooncake(h *host) (connector, error) {
	set := h.settings()
	port := set.count("VLLM_MOONCAKE_BOOTSTRAP_PORT", 0)
	c := &mooncake{
		patience: set.seconds("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480), ranks: max(1, set.count("data_parallel_size", 1)),
		// An orphan with num_workers 2 stopped every later pair, and one with 10 stopped none (17, 18). P's log names two
		// waits for each orphan: the read, and the empty read of its abort. So many tasks fit that, whatever the sources
		// start.
		senders: make(chan struct{}, max(1, set.count("num_workers", 10))),
		workers: map[string]place{}, asking: map[string]chan struct{}{}, client: newClient(),
	}
	if err := set.err(); err != nil {
		return nil, err
	}
	var err error
	if c.wire, err = startWire(h, wireOptions{writes: true, named: c.asked, left: c.left}); err != nil {
		return nil, err
	}
	h.core.setLease(c.patience)
	if h.role != roleConsumer {
		if c.bootstrap, err = listenBootstrap(h, "VLLM_MOONCAKE_BOOTSTRAP_PORT", port, c.answerQuery); err != nil {
			c.wire.close()
			return nil, err
		}
	}
	return c, nil
}

func (c *mooncake) close() {
	c.bootstrap.close()
	c.wire.close()
}

// engine is a rank's engine id: with several ranks each has its own.
func (c *mooncake) engine(rank int) string {
	if c.ranks == 1 {
		return c.host.id
	}
	return c.host.id + "_dp" + strconv.Itoa(rank)
}

// nameOf is a transfer id at one rank of an engine: at another nobody knows it.
func nameOf(engine, id string) string {
	_, rank, _ := strings.Cut(engine, "_dp")
	return id + "@" + rank
}

func (c *mooncake) begin(r *kvRequest) transfer {
	t := &write{c: c, request: r, id: r.params.text("transfer_id")}
	t.pulls = !r.local && r.params.is("do_remote_prefill")
	t.produces = !t.pulls && r.params.is("do_remote_decode")
	if t.produces {
		t.rank = c.rankFor(r)
	}
	return t
}

// rankFor is the data-parallel rank that serves a request: the one that the header
// names, which /v1/responses ignores, else the next in turn.
func (c *mooncake) rankFor(r *kvRequest) int {
	n, err := strconv.Atoi(r.header.Get("X-data-parallel-rank"))
	if err == nil && n >= 0 && n < c.ranks && r.path != "/v1/responses" {
		return n
	}
	return int(c.turn.Add(1) % uint64(c.ranks))
}

// needed are the keys without which D warns, waits, and dies when it is told that
// the client has left (capture 15).
var needed = []string{"remote_engine_id", "remote_bootstrap_addr", "transfer_id"}

func missing(params kvParams) bool {
	for _, key := range needed {
		if !params.has(key) {
			return true
		}
	}
	return false
}

// rejected asks P for nothing, so that it lets go: what D does for a request that
// its API refused.
func (c *mooncake) rejected(ctx context.Context, params kvParams) {
	if !params.is("do_remote_prefill") || params.text("transfer_id") == "" {
		return
	}
	if missing(params) {
		c.core.die()
		return
	}
	to, err := c.find(ctx, params.text("remote_bootstrap_addr"), params.text("remote_engine_id"))
	if err == nil {
		c.letGo(to, nameOf(params.text("remote_engine_id"), params.text("transfer_id")))
	}
}

var (
	errNoBootstrap   = errors.New("no bootstrap server answers")
	errUnknownEngine = errors.New("remote engine id not found from bootstrap server")
)

// find gives where an engine's workers listen. One request asks; the others wait
// for that.
func (c *mooncake) find(ctx context.Context, bootstrap, engine string) (place, error) {
	c.mu.Lock()
	turn := c.asking[bootstrap]
	if turn == nil {
		turn = make(chan struct{}, 1)
		c.asking[bootstrap] = turn
	}
	c.mu.Unlock()
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-ctx.Done():
		return place{}, context.Cause(ctx)
	}
	c.mu.Lock()
	to, ok := c.workers[engine]
	c.mu.Unlock()
	if ok {
		return to, nil
	}
	return c.query(ctx, bootstrap, engine)
}

func (c *mooncake) query(ctx context.Context, bootstrap, engine string) (place, error) {
	var ranks map[string]struct {
		EngineID string                       `json:"engine_id"`
		Workers  map[string]map[string]string `json:"worker_addr"`
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, bootstrap+"/query", nil)
	if err != nil {
		return place{}, errNoBootstrap
	}
	resp, err := c.client.Do(r)
	if err != nil {
		return place{}, errNoBootstrap
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || json.Unmarshal(data, &ranks) != nil {
		return place{}, errNoBootstrap
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rank := range ranks {
		host, port, err := net.SplitHostPort(strings.TrimPrefix(rank.Workers["0"]["0"], "tcp://"))
		if err != nil {
			continue
		}
		id, _, _ := strings.Cut(rank.EngineID, "_dp")
		c.workers[rank.EngineID] = place{id: id, host: host, port: port}
	}
	to, ok := c.workers[engine]
	if !ok {
		return place{}, &loadError{err: errUnknownEngine}
	}
	return to, nil
}

// asked is P's sender: one of a few tasks takes a read on, and waits for the
// prompt as long as it takes, even if the reader leaves.
func (c *mooncake) asked(pipe *Pipe, f Frame, m askMessage) {
	if !c.take() {
		return
	}
	defer func() { <-c.senders }()
	request, ready, over := c.ready(m.Name)
	switch {
	case ready:
		c.side.giveNamed(pipe, f, m, request)
	case !over: // "Timeout waiting for P side ready": D's load has failed (19)
		refuse(pipe, f)
	}
}

// left is the empty read that D sends for a request that was aborted: P lets go
// of the blocks, when it gets them, and another task waits for that.
func (c *mooncake) left(name string) {
	c.spawn(func() {
		if !c.take() {
			return
		}
		defer func() { <-c.senders }()
		if _, ready, _ := c.ready(name); !ready {
			return
		}
		c.side.forget(name)
	})
}

func (c *mooncake) take() bool {
	select {
	case c.senders <- struct{}{}:
		return true
	case <-c.side.gate.ended:
		return false
	}
}

// ready waits until a name is offered. over says that the engine has ended.
func (c *mooncake) ready(name string) (request string, ready, over bool) {
	late := time.NewTimer(c.patience)
	defer late.Stop()
	for {
		request, soon := c.side.offers.get(name)
		if soon == nil {
			return request, true, false
		}
		select {
		case <-soon: // offered, or its reader has left, which ends nothing here
		case <-late.C:
			return "", false, false
		case <-c.side.gate.ended:
			return "", false, true
		}
	}
}

// write is one request's side, on either engine.
type write struct {
	noTransfer
	c        *mooncake
	request  *kvRequest
	id       string
	rank     int
	pulls    bool
	produces bool
}

func (t *write) external() bool { return t.pulls }

// arrived holds vLLM's assertions: the roles are kept, or the engine core dies.
func (t *write) arrived(context.Context, *sequence) (string, error) {
	role := t.c.host.role
	switch {
	case t.pulls && role == roleProducer:
		return "", &engineDeath{"do_remote_prefill on a kv_producer"}
	case t.produces && role == roleConsumer:
		return "", &engineDeath{"do_remote_decode on a kv_consumer"}
	}
	return "", nil
}

func (t *write) dropped(release bool) {
	if t.pulls && release && !t.c.silenced() {
		ctx, stop := context.WithTimeout(t.c.ctx, time.Second)
		defer stop()
		t.c.rejected(ctx, t.request.params)
	}
}

// load asks P, and waits. Only two things fail at once: an engine id that the
// bootstrap server does not know, and P's own word that it has waited too long.
// With all others D waits in silence.
func (t *write) load(ctx context.Context, s *sequence) error {
	params := t.request.params
	if missing(params) {
		<-ctx.Done()
		cause := context.Cause(ctx)
		if !errors.Is(cause, context.Canceled) || !params.has("transfer_id") {
			return cause
		}
		return &engineDeath{"KeyError in the abort of a request without an engine id"}
	}
	engine := params.text("remote_engine_id")
	to, err := t.c.find(ctx, params.text("remote_bootstrap_addr"), engine)
	if err == nil {
		err = t.c.readNamed(ctx, s, to, nameOf(engine, t.id))
	}
	var failed *loadError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errUnknownEngine), errors.Is(err, errOutOfRange):
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
		return &loadError{err: err}
	}
}

// finished offers the prompt's KV, if the answer ended by length: else P frees the
// blocks, and who asks for them waits (08).
func (t *write) finished(s *sequence, reason string) any {
	if t.produces && t.id != "" && reason == reasonLength {
		t.c.offer(s, nameOf(t.c.engine(t.rank), t.id))
	}
	return nil
}
