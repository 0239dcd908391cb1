// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"errors"
	"time"
)

// The way back, from decode to prefill: with bidirectional_kv_xfer, D keeps the
// KV of a finished request and says so in its whole answer, and P takes it for
// the next turn's prompt. After vLLM 0.32.0 as recorded (connector/nixl's
// testdata/turns) and its pull_scheduler.py: P compares no tokens and takes a
// handoff twice, with wrong text, but declines one that is about to expire.

// turnConfig are the settings of it, by vLLM's names.
type turnConfig struct {
	on        bool          // bidirectional_kv_xfer
	ttl       time.Duration // decoder_kv_blocks_ttl, seconds
	threshold int           // kv_recompute_threshold: fewer tokens are computed
}

func turnsOf(set *settings) turnConfig {
	c := turnConfig{on: set.extra["bidirectional_kv_xfer"] == "true", ttl: set.seconds("decoder_kv_blocks_ttl", 480)}
	if c.on {
		c.threshold = 64
	}
	c.threshold = set.count("kv_recompute_threshold", c.threshold)
	return c
}

// promised is all of the prompt, but of a turn's only what D has of it: P takes
// that by position and compares no tokens. When that is not worth while D is told
// to let go.
func (t *pull) promised(s *sequence) int {
	if !t.turn {
		return s.prompt
	}
	var remote int
	_ = json.Unmarshal(t.request.params["remote_num_tokens"], &remote)
	upto := min(remote, s.prompt)
	if upto <= s.computed || upto-s.computed < t.nixl.turns.threshold {
		t.dropped(true)
		return s.computed
	}
	t.upto = upto
	return upto
}

// turnBlocks are the blocks to read for a turn: those that hold the tokens from
// the first missing one on, by position.
func (t *pull) turnBlocks(s *sequence) ([]int64, bool) {
	size := t.nixl.core.blockSize
	ids, ok := blockIDs(t.request.params["remote_block_ids"])
	first, end := s.computed/size, blocksFor(t.upto, size)
	if !ok || end > len(ids) {
		return nil, false
	}
	return ids[first:end], true
}

// expiryMargin is how long before its end a turn's KV is declined.
const expiryMargin = 5 * time.Second

var errExpired = errors.New("the other engine is about to let go of the blocks")

// expired says whether D is about to let go of a turn's KV.
func (t *pull) expired() bool {
	var at float64
	if json.Unmarshal(t.request.params["remote_blocks_expiry_time"], &at) != nil || at == 0 {
		return false
	}
	return float64(time.Now().Add(expiryMargin).UnixMilli())/1e3 > at
}

// kept pins a finished answer's blocks for the next turn, and is the handoff for
// it.
func (t *pull) kept(s *sequence) *handoff {
	c := t.nixl
	host, port := c.side.address()
	h := &handoff{
		DoRemoteDecode: true, EngineID: c.host.id, RequestID: s.id, Host: host, Port: port,
		TPSize: 1, DCPSize: 1, PPSize: 1, NumTokens: s.computed, TransferMode: "pull",
	}
	// Here all engines share a clock; vLLM's compare theirs in the handshake.
	expires := float64(time.Now().Add(c.turns.ttl).UnixMilli()) / 1e3
	h.BlocksExpiryTime = &expires
	blocks := c.core.keep(s, KeyOf(s.tokens[:s.computed]), c.turns.ttl)
	h.BlockIDs = [][]int32{blocks[:blocksFor(h.NumTokens, c.core.blockSize)]}
	return h
}
