// SPDX-License-Identifier: Apache-2.0

// Package relay is an engine whose P names its KV in its response, and whose D is given that as it is. It has the keys
// and the rules of tpu-inference's TPUConnector (0.32.0, tpu_inference/distributed/tpu_connector.py), and stands for
// every engine of this kind.
//
// It reads TPU_P2P_WAIT_PULL_TIMEOUT of Config.Extra: for how many seconds P keeps KV that nobody has read, 180 by
// default.
package relay

import (
	"context"
	"math/rand/v2"
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// connector is one engine's side.
type connector struct{ *proto.Wire }

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	w, err := proto.StartWire(set, proto.Options{Lease: set.Seconds("TPU_P2P_WAIT_PULL_TIMEOUT", 180)})
	if err != nil {
		return nil, err
	}
	return &connector{w}, nil
}

// Begin decides by the role: P's requests carry no flag, and D's whatever P has answered.
func (c *connector) Begin(r *core.Generation) core.Transfer {
	t := &relayed{proto.Legs{Request: r, Produces: c.Host.Role != proto.RoleConsumer}, c}
	t.Pulls = !t.Produces && !r.Local && len(r.Params) > 0
	return t
}

// relayed is one request's side.
type relayed struct {
	proto.Legs
	c *connector
}

// whole are the tokens of a prompt's whole blocks: nothing else is transferred.
func (t *relayed) whole(s *core.Sequence) int {
	return s.Prompt / t.c.Core.BlockSize * t.c.Core.BlockSize
}

// Promised is all that P has, whatever D's own cache has. If that has it all, D only tells P so.
func (t *relayed) Promised(s *core.Sequence) int {
	if t.whole(s) <= s.Computed {
		t.c.Briefly(func(ctx context.Context) {
			t.c.LetGo(ctx, proto.Remote(t.Request.Params), proto.RequestMessage{Name: t.name()})
		})
		return 0
	}
	return t.whole(s)
}

func (t *relayed) name() string { return string(t.Request.Params["uuid"]) }

// Load ends the engine where the real one indexes a key that is not there.
func (t *relayed) Load(ctx context.Context, s *core.Sequence) error {
	params := t.Request.Params
	if key := proto.Missing(params, "uuid", "remote_block_ids", "remote_host", "remote_port"); key != "" {
		return &core.Death{Why: "KeyError: " + key}
	}
	var ids []int64
	size := t.c.Core.BlockSize
	if !params.Read("remote_block_ids", &ids) || len(ids) != t.whole(s)/size {
		return &core.LoadError{Failures: 1, Err: proto.ErrOutOfRange}
	}
	p, err := t.c.Connect(ctx, proto.Remote(params))
	if err != nil {
		return err
	}
	first := s.Computed / size
	return t.c.Take(ctx, p, s, t.whole(s), proto.AskMessage{Name: t.name(), First: first, Count: len(ids) - first})
}

// Finished names the KV of what ended by length. Without a whole block there is none, and P says so by an empty object.
// A port is text, since the engine reads it from its environment.
func (t *relayed) Finished(s *core.Sequence, reason string) any {
	if !t.Produces || reason != core.ReasonLength {
		return nil
	}
	upto := t.whole(s)
	if upto == 0 {
		return python.Object{}
	}
	uuid := rand.Int64N(1 << 50)
	blocks := t.c.Core.Pin(s, core.KeyOf(s.Tokens[:upto]))
	t.c.Side.Offers.Put(strconv.FormatInt(uuid, 10), s.ID)
	host, port := t.c.Side.Address()
	return python.Object{"uuid", uuid, "remote_block_ids", blocks[:upto/t.c.Core.BlockSize], "remote_host", host,
		"remote_port", strconv.Itoa(port)}
}
