// SPDX-License-Identifier: Apache-2.0

package nixl

import (
	"errors"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// The way back, from decode to prefill: with bidirectional_kv_xfer, D keeps the KV of a finished request and says so in
// its whole response, and P takes it for the next turn's prompt. After vLLM 0.32.0 as recorded (connector/nixl's
// testdata/turns) and its pull_scheduler.py: P compares no tokens and takes a handoff twice, with wrong text, but
// declines one that is about to expire.

// turnConfig are the settings of bidirectional_kv_xfer, which vLLM names so.
type turnConfig struct {
	on        bool          // bidirectional_kv_xfer
	ttl       time.Duration // decoder_kv_blocks_ttl, seconds
	threshold int           // kv_recompute_threshold: fewer tokens are computed
}

func turnsOf(set *proto.Settings) turnConfig {
	c := turnConfig{on: set.Extra["bidirectional_kv_xfer"] == "true", ttl: set.Seconds("decoder_kv_blocks_ttl", 480)}
	if c.on {
		c.threshold = 64
	}
	c.threshold = set.Count("kv_recompute_threshold", c.threshold)
	return c
}

// Promised is the whole prompt, but of a turn only what D has of it: P takes that by position and compares no tokens.
// When it is too little, P computes it, and tells D to let go.
func (t *pull) Promised(s *core.Sequence) int {
	if !t.turn {
		return s.Prompt
	}
	var remote int
	t.Request.Params.Read("remote_num_tokens", &remote)
	upto := min(remote, s.Prompt)
	if upto <= s.Computed || upto-s.Computed < t.nixl.turns.threshold {
		t.Dropped(true)
		return s.Computed
	}
	t.upto = upto
	return upto
}

// turnBlocks are the blocks to read for a turn: those that hold the tokens from the first missing one on, by position.
func (t *pull) turnBlocks(s *core.Sequence) ([]int64, bool) {
	size := t.nixl.Core.BlockSize
	ids, ok := proto.BlockIDs(t.Request.Params["remote_block_ids"])
	first, end := s.Computed/size, core.BlocksFor(t.upto, size)
	if !ok || end > len(ids) {
		return nil, false
	}
	return ids[first:end], true
}

// expiryMargin is how long before its end a turn's KV is declined.
const expiryMargin = 5 * time.Second

var errExpired = errors.New("the other engine is about to let go of the blocks")

// expired reports whether D is about to let go of a turn's KV.
func (t *pull) expired() bool {
	var at float64
	return t.Request.Params.Read("remote_blocks_expiry_time", &at) && at != 0 &&
		float64(time.Now().Add(expiryMargin).UnixMilli())/1e3 > at
}

// kept pins a finished response's blocks for the next turn, and is the handoff for it.
func (t *pull) kept(s *core.Sequence) python.Object {
	c := t.nixl
	// Here all engines share a clock; vLLM's compare theirs in the handshake.
	h := c.handoff(s, "pull", float64(time.Now().Add(c.turns.ttl).UnixMilli())/1e3)
	c.Core.Keep(s, core.KeyOf(s.Tokens[:s.Computed]), c.turns.ttl)
	return h
}
