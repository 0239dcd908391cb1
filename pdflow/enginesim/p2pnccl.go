// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"net"
	"regexp"
)

// p2pNCCL moves KV by the request's id alone: P sends to the engine whose address
// stands in it, D waits for what comes under it, for every prompt it gets. It
// follows kv_connector/v1/p2p/p2p_nccl_connector.py before its removal. What P sends
// lies with P here until D asks for it; the last token of a prompt, which the real D
// computes again, counts as loaded.
//
// Config.Extra: VLLM_DISABLE_REQUEST_ID_RANDOMIZATION ("1": the engine's own id is the
// request's, as before vLLM 0.14; without it a random suffix makes both ids differ,
// and D waits for ever). The ZeroMQ address is [Engine.SideChannel].
type p2pNCCL struct {
	*wire
	plain bool
}

func startP2PNCCL(h *host) (connector, error) {
	w, err := startWire(h, wireOptions{writes: h.role != roleConsumer})
	if err != nil {
		return nil, err
	}
	return &p2pNCCL{wire: w, plain: h.extra["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] == "1"}, nil
}

func (c *p2pNCCL) begin(r *kvRequest) transfer {
	t := &byAddress{c: c, id: r.id, sends: c.host.role != roleConsumer}
	if c.plain {
		t.id = r.name
	}
	return t
}

// byAddress is one request's side, by the addresses in its id.
type byAddress struct {
	noTransfer
	c     *p2pNCCL
	id    string
	sends bool
	peer  place
}

// The engine's own expressions.
var (
	p2pDecodeAddress  = regexp.MustCompile(`___decode_addr_(.*):(\d+)`)
	p2pPrefillAddress = regexp.MustCompile(`___prefill_addr_(.*):(\d+)___`)
)

// arrived parses the id, as the worker does for each request. A ValueError there ends
// the engine.
func (t *byAddress) arrived(_ context.Context, s *sequence) (string, error) {
	find := p2pPrefillAddress
	if t.sends {
		find = p2pDecodeAddress
	}
	if !t.sends && s.prompt == 1 {
		return "", nil // nothing is asked for
	}
	m := find.FindStringSubmatch(t.id)
	if m == nil {
		return "", &engineDeath{"ValueError: the request id does not contain hostname and port"}
	}
	t.peer = place{host: m[1], port: m[2]}
	if n := len(m[1]); n > 1 && m[1][0] == '[' && m[1][n-1] == ']' {
		t.peer.host = m[1][1 : n-1]
	}
	return "", nil
}

func (t *byAddress) external() bool { return !t.sends && t.peer.port != "" }

// load waits for the tensors. Those that were sent to another engine never come here.
func (t *byAddress) load(ctx context.Context, s *sequence) error {
	m := p2pDecodeAddress.FindStringSubmatch(t.id)
	if m == nil || net.JoinHostPort(m[1], m[2]) != t.c.sideAddress() {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return t.c.readNamed(ctx, s, t.peer, t.id)
}

func (t *byAddress) finished(s *sequence, reason string) any {
	if t.sends && (reason == reasonLength || reason == reasonStop) {
		t.c.offer(s, t.id)
	}
	return nil
}
