// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
)

// nixlPush matches a decode's registration and a finished prefill by the engines'
// request id without its random suffix, and by nothing else. Behaviour, metrics
// and faults are those of vLLM 0.32.0's NixlPushConnector as recorded
// (captures nixl-push/01 to 09).
type nixlPush struct{ *nixl }

func startNIXLPush(h *host) (connector, error) {
	c, err := startPull(h, true)
	if err != nil {
		return nil, err
	}
	if c.turns.on {
		c.close()
		return nil, errors.New("bidirectional_kv_xfer is not for the push connector")
	}
	return &nixlPush{c}, nil
}

func (c *nixlPush) begin(r *kvRequest) transfer {
	t := &pull{nixl: c.nixl, request: r, produces: r.params.is("do_remote_decode"), pulls: !r.local && r.params.is("do_remote_prefill")}
	if t.pulls {
		c.track(t)
	}
	return &push{t}
}

// rejected lets P go, if the decode that the API refused named P's own request:
// only a handoff does.
func (c *nixlPush) rejected(ctx context.Context, params kvParams) { c.nixl.rejected(ctx, params) }

// push is one request's side. It waits in line and keeps P's lease alive as pull
// does.
type push struct{ *pull }

// registration are the keys that D indexes without a default
// (push_scheduler.py, metadata.py).
var registration = []string{"remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"}

// load registers with P and waits for it to write. Nothing but the end of the
// client ends the wait once P has been reached, and the blocks are then lost:
// P might still write into them (captures 04, 06, 09).
func (t *push) load(ctx context.Context, s *sequence) error {
	c := t.nixl
	defer c.done(t.pull)
	for _, key := range registration {
		if !t.request.params.has(key) {
			return &engineDeath{"registration without " + key}
		}
	}
	to := remote(t.request.params)
	if _, err := c.connect(ctx, to); err != nil {
		return err // the handshake failed: nobody has the registration
	}
	err := c.readNamed(ctx, s, to, t.request.name)
	if _, failed := errors.AsType[*loadError](err); failed {
		<-ctx.Done()
		err = context.Cause(ctx)
	}
	if err != nil {
		c.core.lose(s)
	}
	return err
}

func (t *push) dropped(release bool) { t.pull.dropped(release) }

// pushHandoff is the kv_transfer_params of vLLM 0.32.0, with its 13 keys in order.
type pushHandoff struct {
	DoRemotePrefill bool      `json:"do_remote_prefill"`
	DoRemoteDecode  bool      `json:"do_remote_decode"`
	BlockIDs        [][]int32 `json:"remote_block_ids"`
	EngineID        string    `json:"remote_engine_id"`
	RequestID       string    `json:"remote_request_id"`
	Host            string    `json:"remote_host"`
	Port            int       `json:"remote_port"`
	TPSize          int       `json:"tp_size"`
	DCPSize         int       `json:"dcp_size"`
	PPSize          int       `json:"pp_size"`
	NumTokens       int       `json:"remote_num_tokens"`
	TransferMode    string    `json:"transfer_mode"`
	PrefillCached   *int      `json:"remote_prefill_cached_tokens,omitempty"`
}

func (t *push) finished(s *sequence, reason string) any {
	if !t.produces || reason != reasonLength && reason != reasonStop {
		return nil
	}
	c := t.nixl
	host, port := c.side.address()
	h := &pushHandoff{
		DoRemotePrefill: true, EngineID: c.host.id, RequestID: s.id, Host: host, Port: port,
		TPSize: 1, DCPSize: 1, PPSize: 1, NumTokens: s.computed, TransferMode: "push",
	}
	if s.computed == s.prompt {
		cached := s.cached
		h.PrefillCached = &cached
	}
	h.BlockIDs = [][]int32{s.blocks[:blocksFor(h.NumTokens, c.core.blockSize)]}
	c.offer(s, t.request.name)
	return h
}
