// SPDX-License-Identifier: Apache-2.0

// Package offload is vLLM's OffloadingConnector with TieringOffloadingSpec and a secondary tier of type p2p. P keeps
// the prompt's whole blocks in host memory for the engine that asks for the id that both legs were given. D loads them
// into its own host memory before it schedules the request.
//
// It reads these of Config.Extra: PYTHONHASHSEED, which must be equal, unbound_store_timeout_s (60: how long P keeps
// blocks that nobody asks for) and load_timeout (30 seconds, a constant of the real engine: how long D waits). One
// data-parallel rank is simulated, whose control port is that of the side channel.
package offload

import (
	"context"
	"encoding/json"
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
	*proto.Wire
	seed string
	wait time.Duration

	mu                            sync.Mutex
	bytesRead, bytesWrote, failed int64
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	lease := set.Seconds("unbound_store_timeout_s", 60)
	c := &offload{seed: h.Extra["PYTHONHASHSEED"], wait: set.Seconds("load_timeout", 30)}
	var err error
	if c.Wire, err = proto.StartWire(set, proto.Options{Writes: true, Named: c.asked, Lease: lease}); err != nil {
		return nil, err
	}
	return c, nil
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
	t := &promotion{c: c}
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

// asked serves a fetch on P. It refuses peers with another hash seed at once, and waits for an id that nobody has
// stored yet.
func (c *offload) asked(pipe *core.Pipe, f core.Frame, m proto.AskMessage) {
	seed, _, _ := strings.Cut(m.Name, "/")
	if seed != c.seed {
		proto.Refuse(pipe, f)
		return
	}
	request, ok := c.Side.Await(m.Name)
	if !ok {
		return
	}
	c.mu.Lock()
	c.bytesWrote += int64(m.Count * c.Core.BlockBytes)
	c.mu.Unlock()
	c.Side.GiveNamed(pipe, f, m, request)
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
	stores string // the id under which P keeps the prompt's blocks
	loads  string // the id for which D asks
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
		t.c.Offer(s, t.c.seed+"/"+t.stores)
	}
	return nil
}
