// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"time"
)

// mooncakeAscend is one engine's side, after vllm-ascend 182b75e,
// kv_p2p/mooncake_connector.py. None of it was recorded.
type mooncakeAscend struct{ *wire }

func startMooncakeAscend(h *host) (connector, error) {
	set := h.settings()
	lease := set.seconds("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480)
	if err := set.err(); err != nil {
		return nil, err
	}
	w, err := startWire(h, wireOptions{})
	if err != nil {
		return nil, err
	}
	h.core.setLease(lease)
	return &mooncakeAscend{w}, nil
}

func (c *mooncakeAscend) begin(r *kvRequest) transfer {
	return &ascendPull{
		c: c, request: r, produces: r.params.is("do_remote_decode"),
		pulls: !r.local && r.params.is("do_remote_prefill"),
	}
}

// rejected is the empty receive that lets P free its blocks.
func (c *mooncakeAscend) rejected(ctx context.Context, params kvParams) {
	if !params.is("do_remote_prefill") || !addressed(params) {
		return
	}
	if p, err := c.connect(ctx, remote(params)); err == nil {
		_ = p.release(ctx, requestMessage{Request: params.text("remote_request_id")})
	}
}

// ascendPull is one request's side.
type ascendPull struct {
	noTransfer
	c               *mooncakeAscend
	request         *kvRequest
	pulls, produces bool
}

func (t *ascendPull) external() bool { return t.pulls }
func (t *ascendPull) dropped(release bool) {
	if !t.pulls || !release || t.c.silenced() {
		return
	}
	ctx, stop := context.WithTimeout(t.c.ctx, time.Second)
	defer stop()
	t.c.rejected(ctx, t.request.params)
}

func (t *ascendPull) load(ctx context.Context, s *sequence) error {
	params := t.request.params
	groups := params["remote_block_ids"]
	if !truthy(groups) {
		return &engineDeath{"assertion: tokens are promised, but there are no remote block ids"}
	}
	if !addressed(params) {
		<-ctx.Done() // "Got invalid KVTransferParams", and nothing follows
		return context.Cause(ctx)
	}
	ids, ok := blockIDs(groups)
	need := len(s.blocks) - s.computed/t.c.core.blockSize
	var prompt int
	if _ = json.Unmarshal(params["num_prompt_blocks"], &prompt); !ok || prompt < need {
		return &engineDeath{"assertion in the worker: the prompt has fewer blocks than are promised"}
	}
	if len(ids) < need {
		return &loadError{failures: 1, err: errOutOfRange}
	}
	ids = ids[len(ids)-need:]
	p, err := t.c.connect(ctx, remote(params))
	if err != nil {
		return err
	}
	request := params.text("remote_request_id")
	if err := t.c.fetch(ctx, p, s, s.prompt, askMessage{Request: request, Blocks: ids}); err != nil {
		return err
	}
	return p.release(ctx, requestMessage{Request: request})
}

// ascendHandoff is what P answers, with the keys of request_finished in order.
type ascendHandoff struct {
	DoRemotePrefill bool           `json:"do_remote_prefill"`
	DoRemoteDecode  bool           `json:"do_remote_decode"`
	BlockIDs        [][]int32      `json:"remote_block_ids"`
	EngineID        string         `json:"remote_engine_id"`
	RequestID       string         `json:"remote_request_id"`
	Host            string         `json:"remote_host"`
	Port            int            `json:"remote_port"`
	PCPSize         int            `json:"remote_pcp_size"`
	DCPSize         int            `json:"remote_dcp_size"`
	PTPSize         int            `json:"remote_ptp_size"`
	LastToken       int32          `json:"last_token_id"`
	Nodes           map[string]any `json:"remote_multi_nodes_meta_mapping"`
	PromptBlocks    int            `json:"num_prompt_blocks"`
	BlockSize       int            `json:"remote_block_size"`
}

// finished hands off only what ended by length.
func (t *ascendPull) finished(s *sequence, reason string) any {
	if !t.produces || reason != reasonLength {
		return nil
	}
	last := s.tokens[len(s.tokens)-1]
	blocks := t.c.core.pin(s, KeyOf(s.tokens[:s.prompt]))
	host, port := t.c.side.address()
	size := t.c.core.blockSize
	prompt := blocksFor(s.prompt, size)
	return &ascendHandoff{
		DoRemotePrefill: true, BlockIDs: [][]int32{blocks[:prompt]}, EngineID: t.c.host.id, RequestID: s.id, Host: host, Port: port,
		PCPSize: 1, DCPSize: 1, PTPSize: 1, LastToken: last, PromptBlocks: prompt, BlockSize: size,
		Nodes: map[string]any{"0": map[string]any{"host": host, "engine_id": t.c.host.id, "handshake_port": port}},
	}
}
