// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"time"
)

// offload follows vllm/v1/kv_offload/tiering/p2p/manager.py (017e9f44, between 0.27.1
// and 0.28; docs/features/kv_offloading_usage.md, 0078e9d2); it was not recorded.
type offload struct {
	*wire
	seed string
	wait time.Duration

	mu                            sync.Mutex
	bytesRead, bytesWrote, failed int64
}

func startOffload(h *host) (connector, error) {
	set := h.settings()
	lease := set.seconds("unbound_store_timeout_s", 60)
	c := &offload{seed: h.extra["PYTHONHASHSEED"], wait: set.seconds("load_timeout", 30)}
	if err := set.err(); err != nil {
		return nil, err
	}
	var err error
	if c.wire, err = startWire(h, wireOptions{writes: true, named: c.asked}); err != nil {
		return nil, err
	}
	h.core.setLease(lease)
	return c, nil
}

// peerOf is one of the sub-objects of kv_transfer_params. Its names before July 2026
// (prefill, decode, p2p) are unknown keys here, and unknown keys are ignored.
type peerOf struct {
	ID   string          `json:"kv_request_id"`
	Host string          `json:"remote_host"`
	Port json.RawMessage `json:"remote_port"`
}

func peerIn(p kvParams, key string) (o peerOf, ok bool) {
	return o, p.given(key) && json.Unmarshal(p[key], &o) == nil
}

func (c *offload) begin(r *kvRequest) transfer {
	t := &promotion{c: c}
	if o, ok := peerIn(r.params, "remote_decoder"); ok {
		t.stores = o.ID // without one the store fails, and nobody is told
	}
	o, ok := peerIn(r.params, "remote_prefiller")
	if port := strings.Trim(string(o.Port), `"`); ok && !r.local && o.ID != "" && o.Host != "" && port != "" && port != "0" {
		t.loads, t.from = o.ID, place{host: strings.Trim(o.Host, "[]"), port: port}
	}
	return t
}

// asked is P's answer to a fetch. Peers with another hash seed are turned away at
// once; an id that nobody has stored yet is waited for.
func (c *offload) asked(pipe *Pipe, f Frame, m askMessage) {
	seed, _, _ := strings.Cut(m.Name, "/")
	if seed != c.seed {
		refuse(pipe, f)
		return
	}
	request, ok := c.side.await(m.Name)
	if !ok {
		return
	}
	c.mu.Lock()
	c.bytesWrote += int64(m.Count * c.core.blockBytes)
	c.mu.Unlock()
	c.side.giveNamed(pipe, f, m, request)
}

// metrics are those that the connector adds to the page. Tier 0 is the host memory.
func (c *offload) metrics(p *page) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range []struct {
		name  string
		value int64
	}{{"read_bytes", c.bytesRead}, {"write_bytes", c.bytesWrote}, {"promotion_job_failures", c.failed}, {"cascade_job_failures", 0}} {
		p.family("kv_offload_tiering_"+m.name+"_total", "counter", sample{after: `,tier="1:p2p"`, value: float64(m.value)})
	}
}

// promotion is one request's side, on either engine.
type promotion struct {
	noTransfer
	c      *offload
	stores string // the id under which P keeps the prompt's blocks
	loads  string // the id for which D asks
	from   place
	blocks [][]byte // in D's host memory
}

// arrived loads the blocks into host memory: a request is not scheduled before
// that. Whatever goes wrong, D computes the prompt itself, and no policy is asked.
func (t *promotion) arrived(ctx context.Context, s *sequence) (string, error) {
	full := s.prompt / t.c.core.blockSize
	if t.loads == "" || full == 0 {
		return "", nil
	}
	limited, stop := context.WithTimeout(ctx, t.c.wait)
	defer stop()
	name := t.c.seed + "/" + t.loads
	p, err := t.c.connect(limited, t.from)
	if err == nil {
		t.blocks, err = p.ask(limited, KeyOf(s.tokens[:s.prompt]), askMessage{Name: name, Count: full})
	}
	if err == nil {
		_ = p.release(ctx, requestMessage{Name: name})
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
	t.c.bytesRead += int64(full * t.c.core.blockBytes)
	return "", nil
}

func (t *promotion) external() bool { return t.blocks != nil }
func (t *promotion) promised(s *sequence) int {
	return max(s.computed, len(t.blocks)*t.c.core.blockSize)
}

func (t *promotion) load(_ context.Context, s *sequence) error {
	size := t.c.core.blockSize
	t.c.core.fill(s, t.blocks[s.computed/size:], len(t.blocks)*size)
	return nil
}

// finished keeps the prompt's blocks, however the answer ended. The real engine
// has copied them to host memory by then; here they stay where they are.
func (t *promotion) finished(s *sequence, _ string) any {
	if t.stores != "" && s.prompt >= t.c.core.blockSize {
		t.c.offer(s, t.c.seed+"/"+t.stores)
	}
	return nil
}
