// SPDX-License-Identifier: Apache-2.0

// Package mooncakeascend is vllm-ascend's MooncakeConnectorV1, in which D reads P's blocks.
//
// It reads VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT of Config.Extra: for how many seconds P keeps blocks that nobody has
// read, 480 by default.
package mooncakeascend

import (
	"context"
	"encoding/json"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// mooncakeAscend is one engine's side, after vllm-ascend 182b75e, kv_p2p/mooncake_connector.py. None of it was
// recorded.
type mooncakeAscend struct{ *proto.Wire }

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	lease := set.Seconds("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480)
	if err := set.Err(); err != nil {
		return nil, err
	}
	w, err := proto.StartWire(h, proto.Options{})
	if err != nil {
		return nil, err
	}
	h.Core.SetLease(lease)
	return &mooncakeAscend{w}, nil
}

func (c *mooncakeAscend) Begin(r *core.Request) core.Transfer {
	return &ascendPull{
		c: c, request: r, produces: r.Params.Is("do_remote_decode"),
		pulls: !r.Local && r.Params.Is("do_remote_prefill"),
	}
}

// Rejected is the empty receive that lets P free its blocks.
func (c *mooncakeAscend) Rejected(ctx context.Context, params core.Params) {
	if params.Is("do_remote_prefill") {
		c.LetGoOf(ctx, params)
	}
}

// ascendPull is one request's side.
type ascendPull struct {
	core.NoTransfer
	c               *mooncakeAscend
	request         *core.Request
	pulls, produces bool
}

func (t *ascendPull) External() bool { return t.pulls }
func (t *ascendPull) Dropped(release bool) {
	if t.pulls && release {
		t.c.Briefly(func(ctx context.Context) { t.c.Rejected(ctx, t.request.Params) })
	}
}

func (t *ascendPull) Load(ctx context.Context, s *core.Sequence) error {
	params := t.request.Params
	groups := params["remote_block_ids"]
	if !python.Truthy(groups) {
		return &core.Death{Why: "assertion: tokens are promised, but there are no remote block ids"}
	}
	if !proto.Addressed(params) {
		<-ctx.Done() // "Got invalid KVTransferParams", and nothing follows
		return context.Cause(ctx)
	}
	ids, ok := proto.BlockIDs(groups)
	need := len(s.Blocks) - s.Computed/t.c.Core.BlockSize
	var prompt int
	if _ = json.Unmarshal(params["num_prompt_blocks"], &prompt); !ok || prompt < need {
		return &core.Death{Why: "assertion in the worker: the prompt has fewer blocks than are promised"}
	}
	if len(ids) < need {
		return &core.LoadError{Failures: 1, Err: proto.ErrOutOfRange}
	}
	ids = ids[len(ids)-need:]
	p, err := t.c.Connect(ctx, proto.Remote(params))
	if err != nil {
		return err
	}
	request := params.Text("remote_request_id")
	if err := t.c.Fetch(ctx, p, s, s.Prompt, proto.AskMessage{Request: request, Blocks: ids}); err != nil {
		return err
	}
	return p.Release(ctx, proto.RequestMessage{Request: request})
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

// Finished hands off only what ended by length.
func (t *ascendPull) Finished(s *core.Sequence, reason string) any {
	if !t.produces || reason != core.ReasonLength {
		return nil
	}
	last := s.Tokens[len(s.Tokens)-1]
	blocks := t.c.Core.Pin(s, core.KeyOf(s.Tokens[:s.Prompt]))
	host, port := t.c.Side.Address()
	size := t.c.Core.BlockSize
	prompt := core.BlocksFor(s.Prompt, size)
	return &ascendHandoff{
		DoRemotePrefill: true, BlockIDs: [][]int32{blocks[:prompt]}, EngineID: t.c.Host.ID, RequestID: s.ID, Host: host,
		Port:    port,
		PCPSize: 1, DCPSize: 1, PTPSize: 1, LastToken: last, PromptBlocks: prompt, BlockSize: size,
		Nodes: map[string]any{"0": map[string]any{"host": host, "engine_id": t.c.Host.ID, "handshake_port": port}},
	}
}
