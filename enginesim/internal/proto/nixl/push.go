// SPDX-License-Identifier: Apache-2.0

package nixl

import (
	"context"
	"errors"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

// nixlPush matches a decode's registration and a finished prefill by the engines' request id without its random suffix,
// and by nothing else. Behaviour, metrics and faults are those of vLLM 0.32.0's NixlPushConnector as recorded
// (docs/protocols/nixl-push.md).
type nixlPush struct{ *Connector }

// StartPush starts the push connector of an engine.
func StartPush(h *proto.Host) (core.Connector, error) {
	c, err := New(h, true)
	if err != nil {
		return nil, err
	}
	if c.turns.on {
		c.Close()
		return nil, errors.New("bidirectional_kv_xfer is not for the push connector")
	}
	return &nixlPush{c}, nil
}

func (c *nixlPush) Begin(r *core.Generation) core.Transfer {
	t := &pull{Legs: proto.LegsOf(r), nixl: c.Connector}
	c.track(t)
	return &push{t}
}

// push is one request's side. It waits in line and keeps P's lease alive as pull does.
type push struct{ *pull }

// registration are the keys that D indexes without a default (push_scheduler.py, metadata.py).
var registration = []string{"remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"}

// Load registers with P and waits for it to write. Nothing but the end of the client ends the wait once P has been
// reached, and the blocks are then lost: P might still write into them (docs/protocols/nixl-push.md, recordings 04, 06,
// 09).
func (t *push) Load(ctx context.Context, s *core.Sequence) error {
	c := t.nixl
	defer c.done(t.pull)
	if key := proto.Missing(t.Request.Params, registration...); key != "" {
		return &core.Death{Why: "registration without " + key}
	}
	to := proto.Remote(t.Request.Params)
	if _, err := c.Connect(ctx, to); err != nil {
		return err // the handshake failed: nobody has the registration
	}
	err := c.ReadNamed(ctx, s, to, t.Request.Name)
	if _, failed := errors.AsType[*core.LoadError](err); failed {
		err = proto.Hang(ctx)
	}
	if err != nil {
		c.Core.Lose(s)
	}
	return err
}

func (t *push) Finished(s *core.Sequence, reason string) any {
	if !t.Produces || !proto.Ended(reason) {
		return nil
	}
	h := t.nixl.handoff(s, "push", nil)
	t.nixl.Offer(s, t.Request.Name)
	return h
}
