// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"time"
)

// connectorMooncakeAscend is vllm-ascend's MooncakeConnectorV1, in which D pulls.
//
// It reads VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT (seconds, 480) of Config.Extra: how
// long P keeps blocks that nobody has read.
const connectorMooncakeAscend = "mooncake-ascend"

// mooncakeAscend is one engine's side, after vllm-ascend 182b75e,
// kv_p2p/mooncake_connector.py. None of it was recorded.
type mooncakeAscend struct{ *wire }

func startMooncakeAscend(n *node) (connector, error) {
	seconds, err := extraNumber(n.cfg, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480)
	if err != nil {
		return nil, err
	}
	w, err := startWire(n)
	if err != nil {
		return nil, err
	}
	n.core.cfg.Lease = time.Duration(seconds * float64(time.Second))
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
	c               *mooncakeAscend
	request         *kvRequest
	pulls, produces bool
}

func (t *ascendPull) external() bool        { return t.pulls }
func (t *ascendPull) reported() (int, bool) { return 0, false }
func (t *ascendPull) queued()               {}

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
	need := len(s.blocks) - s.computed/t.c.core.cfg.BlockSize
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
	begun := time.Now()
	blocks, err := p.ask(ctx, KeyOf(s.tokens[:s.prompt]), askMessage{Request: params.text("remote_request_id"), Blocks: ids})
	if err != nil {
		return err
	}
	t.c.core.fill(s, blocks, s.prompt)
	t.c.node.stats.transferred(len(ids)*t.c.core.pool.size, len(ids), time.Since(begun))
	return p.release(ctx, requestMessage{Request: params.text("remote_request_id")})
}

// truthy says whether Python takes a JSON value for true.
func truthy(raw json.RawMessage) bool {
	switch string(raw) {
	case "", "null", "false", "0", `""`, "[]", "{}":
		return false
	}
	return true
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
	size := t.c.core.cfg.BlockSize
	prompt := blocksFor(s.prompt, size)
	return &ascendHandoff{
		DoRemotePrefill: true, BlockIDs: [][]int32{blocks[:prompt]}, EngineID: t.c.node.engineID, RequestID: s.id, Host: host, Port: port,
		PCPSize: 1, DCPSize: 1, PTPSize: 1, LastToken: last, PromptBlocks: prompt, BlockSize: size,
		Nodes: map[string]any{"0": map[string]any{"host": host, "engine_id": t.c.node.engineID, "handshake_port": port}},
	}
}
