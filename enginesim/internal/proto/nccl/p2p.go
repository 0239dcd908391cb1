// SPDX-License-Identifier: Apache-2.0

// Package nccl is vLLM's connectors over NCCL: P2pNcclConnector, which is gone after 0.22, and PyNcclConnector of the
// V0 engine, which is gone since 0.11.
package nccl

import (
	"context"
	"net"
	"regexp"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

// p2pNCCL moves KV by the request's id alone. P sends to the engine whose address is in the id. D waits, for every
// prompt, for what comes under the id. It follows kv_connector/v1/p2p/p2p_nccl_connector.py before its removal. Here P
// keeps what it sends until D asks for it, and the last token of a prompt, which the real D computes again, counts as
// loaded.
//
// Config.Extra: VLLM_DISABLE_REQUEST_ID_RANDOMIZATION ("1": the engine's own id is the request's, as before vLLM 0.14;
// without it a random suffix makes both ids differ, and D waits forever). The ZeroMQ address is the side channel.
type p2pNCCL struct {
	*proto.Wire
	plain bool
}

// StartP2P starts the P2pNcclConnector of an engine.
func StartP2P(h *proto.Host) (core.Connector, error) {
	w, err := proto.StartWire(h.Settings(), proto.Options{Writes: h.Role != proto.RoleConsumer})
	if err != nil {
		return nil, err
	}
	return &p2pNCCL{Wire: w, plain: h.Extra["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] == "1"}, nil
}

func (c *p2pNCCL) Begin(r *core.Generation) core.Transfer {
	t := &byAddress{c: c, id: r.ID, sends: c.Host.Role != proto.RoleConsumer}
	if c.plain {
		t.id = r.Name
	}
	return t
}

// byAddress is one request's side, by the addresses in its id.
type byAddress struct {
	core.NoTransfer
	c     *p2pNCCL
	id    string
	sends bool
	peer  proto.Place
}

// The engine's own expressions.
var (
	p2pDecodeAddress  = regexp.MustCompile(`___decode_addr_(.*):(\d+)`)
	p2pPrefillAddress = regexp.MustCompile(`___prefill_addr_(.*):(\d+)___`)
)

// Arrived parses the id, as the worker does for each request. A ValueError there ends the engine.
func (t *byAddress) Arrived(_ context.Context, s *core.Sequence) (string, error) {
	find := p2pPrefillAddress
	if t.sends {
		find = p2pDecodeAddress
	}
	if !t.sends && s.Prompt == 1 {
		return "", nil // nothing is asked for
	}
	m := find.FindStringSubmatch(t.id)
	if m == nil {
		return "", &core.Death{Why: "ValueError: the request id does not contain hostname and port"}
	}
	t.peer = proto.Place{Host: m[1], Port: m[2]}
	if n := len(m[1]); n > 1 && m[1][0] == '[' && m[1][n-1] == ']' {
		t.peer.Host = m[1][1 : n-1]
	}
	return "", nil
}

func (t *byAddress) External() bool { return !t.sends && t.peer.Port != "" }

// Load waits for the tensors. Those that were sent to another engine never come here.
func (t *byAddress) Load(ctx context.Context, s *core.Sequence) error {
	m := p2pDecodeAddress.FindStringSubmatch(t.id)
	if m == nil || net.JoinHostPort(m[1], m[2]) != t.c.SideAddress() {
		return proto.Hang(ctx)
	}
	return t.c.ReadNamed(ctx, s, t.peer, t.id)
}

func (t *byAddress) Finished(s *core.Sequence, reason string) any {
	if t.sends && proto.Ended(reason) {
		t.c.Offer(s, t.id)
	}
	return nil
}
