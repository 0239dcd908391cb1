// SPDX-License-Identifier: Apache-2.0

// Package offload is vLLM's OffloadingConnector with TieringOffloadingSpec and a secondary tier of type p2p. P keeps
// the prompt's whole blocks in host memory for the engine that asks for the id that both legs were given. D loads them
// into its own host memory before it schedules the request.
//
// It reads these of Config.Extra: PYTHONHASHSEED, which must be equal, unbound_store_timeout_s (60: how long P keeps
// blocks that nobody asks for) and load_timeout (30 seconds, a constant of the real engine: how long D waits). Two more
// are those of data parallelism: data_parallel_size_local (1), the ranks behind the engine's HTTP port, and
// data_parallel_start_rank (0), the number of the first of them among all ranks. Each rank has a control port, that of
// the side channel plus the rank's number among all, and gives at this port only what it has computed itself.
package offload

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/metrics"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

// offload follows vllm/v1/kv_offload/tiering/p2p/manager.py (017e9f44, between 0.27.1 and 0.28;
// docs/features/kv_offloading_usage.md, 0078e9d2); it was not recorded.
type offload struct {
	*proto.Wire // of the first rank
	others      []*proto.Wire
	base        string // the address from which the ranks count their ports
	seed        string
	wait        time.Duration

	mu                            sync.Mutex
	bytesRead, bytesWrote, failed int64
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	lease := set.Seconds("unbound_store_timeout_s", 60)
	c := &offload{seed: h.Extra["PYTHONHASHSEED"], wait: set.Seconds("load_timeout", 30)}
	local, start := max(set.Count("data_parallel_size_local", 1), 1), set.Count("data_parallel_start_rank", 0)
	if err := set.Err(); err != nil {
		return nil, err
	}
	for i := range local {
		w, err := c.listen(h, start+i, lease)
		if err != nil {
			if i > 0 {
				c.Close()
			}
			return nil, err
		}
		if i == 0 {
			c.Wire = w
		} else {
			c.others = append(c.others, w)
		}
	}
	if c.base = h.SideChannel; start == 0 {
		c.base = c.Wire.SideAddress()
	}
	return c, nil
}

// listen opens the control port of the rank with this number.
func (c *offload) listen(h *proto.Host, rank int, lease time.Duration) (w *proto.Wire, err error) {
	of := *h
	if rank > 0 {
		host, text, err := net.SplitHostPort(h.SideChannel)
		if err != nil {
			return nil, err
		}
		port, err := strconv.Atoi(text)
		if err != nil || port == 0 {
			return nil, errors.New("data-parallel ranks need a SideChannel with a port")
		}
		of.SideChannel = net.JoinHostPort(host, strconv.Itoa(port+rank))
	}
	started := make(chan struct{})
	named := func(pipe *core.Pipe, f core.Frame, m proto.AskMessage) {
		<-started
		c.asked(w, pipe, f, m)
	}
	w, err = proto.StartWire(of.Settings(), proto.Options{Lease: lease, Writes: true, Named: named})
	close(started)
	return w, err
}

// SideAddress is where rank 0 listens, or would.
func (c *offload) SideAddress() string { return c.base }

// Freeze stops serving other engines, or goes on.
func (c *offload) Freeze(frozen bool) {
	c.Wire.Freeze(frozen)
	for _, w := range c.others {
		w.Freeze(frozen)
	}
}

// Close ends all connections.
func (c *offload) Close() {
	c.Wire.Close()
	for _, w := range c.others {
		w.Close()
	}
}

// rankOf returns the wire of the rank that serves a request: the one that the header names by its number behind the
// HTTP port, else the last. The API has refused other numbers.
func (c *offload) rankOf(r *core.Generation) *proto.Wire {
	ranks := append([]*proto.Wire{c.Wire}, c.others...)
	if n, ok := proto.RankOf(r, len(ranks)); ok {
		return ranks[n]
	}
	return ranks[len(ranks)-1]
}

// peerOf is one of the sub-objects of kv_transfer_params. Its names before July 2026 (prefill, decode, p2p) are unknown
// keys here, and unknown keys are ignored.
type peerOf struct {
	ID   string          `json:"kv_request_id"`
	Host string          `json:"remote_host"`
	Port json.RawMessage `json:"remote_port"`
}

func peerIn(p core.Params, key string) (o peerOf, ok bool) {
	ok = p.Read(key, &o)
	return o, ok
}

func (c *offload) Begin(r *core.Generation) core.Transfer {
	t := &promotion{c: c, rank: c.rankOf(r)}
	if o, ok := peerIn(r.Params, "remote_decoder"); ok {
		t.stores = o.ID // without one the store fails, and nobody is told
	}
	o, ok := peerIn(r.Params, "remote_prefiller")
	if port := strings.Trim(string(o.Port), `"`); ok && !r.Local && o.ID != "" && o.Host != "" && port != "" &&
		port != "0" {
		t.loads, t.from = o.ID, proto.Place{Host: strings.Trim(o.Host, "[]"), Port: port}
	}
	return t
}

// asked serves a fetch at the control port of one of P's ranks. It refuses peers with another hash seed at once, and
// waits for an id under which this rank has stored nothing yet.
func (c *offload) asked(rank *proto.Wire, pipe *core.Pipe, f core.Frame, m proto.AskMessage) {
	seed, _, _ := strings.Cut(m.Name, "/")
	if seed != c.seed {
		proto.Refuse(pipe, f)
		return
	}
	request, ok := rank.Side.Await(m.Name)
	if !ok {
		return
	}
	c.mu.Lock()
	c.bytesWrote += int64(m.Count * c.Core.BlockBytes)
	c.mu.Unlock()
	rank.Side.GiveNamed(pipe, f, m, request)
}

// Metrics are those that the connector adds to the page. Tier 0 is the host memory.
func (c *offload) Metrics(p *metrics.Page) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range []struct {
		name  string
		value int64
	}{{"read_bytes", c.bytesRead}, {"write_bytes", c.bytesWrote}, {"promotion_job_failures",
		c.failed}, {"cascade_job_failures", 0}} {
		p.Family("kv_offload_tiering_"+m.name+"_total", "counter",
			metrics.Sample{After: `,tier="1:p2p"`, Value: float64(m.value)})
	}
}

// promotion is one request's side, on either engine.
type promotion struct {
	core.NoTransfer
	c      *offload
	rank   *proto.Wire // of the rank that serves the request
	stores string      // the id under which P keeps the prompt's blocks
	loads  string      // the id for which D asks
	from   proto.Place
	blocks [][]byte // in D's host memory
}

// Arrived loads the blocks into host memory: a request is not scheduled before that. Whatever goes wrong, D computes
// the prompt itself, and no policy is asked.
func (t *promotion) Arrived(ctx context.Context, s *core.Sequence) (string, error) {
	full := s.Prompt / t.c.Core.BlockSize
	if t.loads == "" || full == 0 {
		return "", nil
	}
	limited, stop := context.WithTimeout(ctx, t.c.wait)
	defer stop()
	name := t.c.seed + "/" + t.loads
	p, err := t.c.Connect(limited, t.from)
	if err == nil {
		t.blocks, err = p.Ask(limited, core.KeyOf(s.Tokens[:s.Prompt]), proto.AskMessage{Name: name, Count: full})
	}
	if err == nil {
		_ = p.Release(ctx, proto.RequestMessage{Name: name})
	}
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	t.c.mu.Lock()
	defer t.c.mu.Unlock()
	if err != nil {
		t.c.failed++
		return "", nil
	}
	t.c.bytesRead += int64(full * t.c.Core.BlockBytes)
	return "", nil
}

func (t *promotion) External() bool { return t.blocks != nil }
func (t *promotion) Promised(s *core.Sequence) int {
	return max(s.Computed, len(t.blocks)*t.c.Core.BlockSize)
}

func (t *promotion) Load(_ context.Context, s *core.Sequence) error {
	size := t.c.Core.BlockSize
	t.c.Core.Fill(s, t.blocks[s.Computed/size:], len(t.blocks)*size)
	return nil
}

// Finished keeps the prompt's blocks, however the response ended. The real engine has copied them to host memory by
// then; here they stay where they are.
func (t *promotion) Finished(s *core.Sequence, _ string) any {
	if t.stores != "" && s.Prompt >= t.c.Core.BlockSize {
		t.rank.Offer(s, t.c.seed+"/"+t.stores)
	}
	return nil
}
