// SPDX-License-Identifier: Apache-2.0

// Package mooncakeascend is vllm-ascend's MooncakeConnectorV1, in which D reads P's blocks.
//
// It reads VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT of Config.Extra: for how many seconds P keeps blocks that nobody has
// read, 480 by default.
package mooncakeascend

import (
	"context"

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
	w, err := proto.StartWire(set, proto.Options{Lease: set.Seconds("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480)})
	if err != nil {
		return nil, err
	}
	return &mooncakeAscend{w}, nil
}

func (c *mooncakeAscend) Begin(r *core.Generation) core.Transfer {
	return &ascendPull{Legs: proto.LegsOf(r), c: c}
}

// Rejected is the empty receive that lets P free its blocks.
func (c *mooncakeAscend) Rejected(ctx context.Context, params core.Params) {
	if params.Is("do_remote_prefill") {
		c.LetGoOf(ctx, params)
	}
}

// ascendPull is one request's side.
type ascendPull struct {
	proto.Legs
	c *mooncakeAscend
}

func (t *ascendPull) Dropped(release bool) {
	if t.Pulls && release {
		t.c.Briefly(func(ctx context.Context) { t.c.Rejected(ctx, t.Request.Params) })
	}
}

func (t *ascendPull) Load(ctx context.Context, s *core.Sequence) error {
	params := t.Request.Params
	groups := params["remote_block_ids"]
	if !python.Truthy(groups) {
		return &core.Death{Why: "assertion: tokens are promised, but there are no remote block ids"}
	}
	if !proto.Addressed(params) {
		return proto.Hang(ctx) // "Got invalid KVTransferParams", and nothing follows
	}
	ids, ok := proto.BlockIDs(groups)
	need := len(s.Blocks) - s.Computed/t.c.Core.BlockSize
	var prompt int
	if params.Read("num_prompt_blocks", &prompt); !ok || prompt < need {
		return &core.Death{Why: "assertion in the worker: the prompt has fewer blocks than are promised"}
	}
	if len(ids) < need {
		return &core.LoadError{Failures: 1, Err: proto.ErrOutOfRange}
	}
	return t.c.ReadRequest(ctx, s, proto.Remote(params), params.Text("remote_request_id"), ids[len(ids)-need:])
}

// Finished hands off only what ended by length, with the keys of request_finished in order.
func (t *ascendPull) Finished(s *core.Sequence, reason string) any {
	if !t.Produces || reason != core.ReasonLength {
		return nil
	}
	c, id := t.c, t.c.Host.ID
	host, port := c.Side.Address()
	last, prompt := s.Tokens[len(s.Tokens)-1], core.BlocksFor(s.Prompt, c.Core.BlockSize)
	return python.Object{"do_remote_prefill", true, "do_remote_decode", false,
		"remote_block_ids", [][]int32{c.Core.Pin(s, core.KeyOf(s.Tokens[:s.Prompt]))[:prompt]},
		"remote_engine_id", id, "remote_request_id", s.ID, "remote_host", host, "remote_port", port,
		"remote_pcp_size", 1, "remote_dcp_size", 1, "remote_ptp_size", 1, "last_token_id", last,
		"remote_multi_nodes_meta_mapping", map[string]any{"0": map[string]any{"host": host, "engine_id": id,
			"handshake_port": port}},
		"num_prompt_blocks", prompt, "remote_block_size", c.Core.BlockSize}
}
