// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// Engines are trusted little: a port that publishes events has no authentication.
func FuzzApply(f *testing.F) {
	p := tokensOf(64, 1)
	h := []u64{1, 2, 3, 4}
	for _, payload := range [][]byte{
		message(storedEvent(h, nil, p, 16, "medium", "GPU", "extra_keys", []any{[]any{[]any{"cat", 10}, "salt"}, nil,
			nil, nil})),
		message(storedEvent(h[:2], nil, p[:32], 16), storedEvent(h[2:], u64(2), p[32:], 16), removedEvent(h[1:3])),
		message([]any{"BlockStored", h, nil, p, 16, nil, "CPU", "lora", nil, 0, "full_attention"}, []any{"BlockRemoved",
			h, "CPU", 0}),
		message(storedEvent(h, nil, nil, 16, "medium", "CPU"), clearedEvent),
		message(storedEvent(h[:2], nil, p[:4], 2, "lookahead_token_ids", []any{p[:1], p[:1]})),
		message(pairs{"type", "BlockStored", "block_hashes", []any{-1, bin("x")}, "token_ids", []any{[]any{1, 2},
			[]any{2, 3}}, "block_size", 1}),
		wire(nil).put(pairs{"ts", 1.5, "events", []any{storedEvent(h, nil, p, 16, "group_idx", 1, "kv_cache_spec_kind",
			"mamba")}}),
	} {
		f.Add(payload, payload)
	}
	f.Fuzz(func(t *testing.T, one, two []byte) {
		x := New(WithMaxBlocks(1000))
		_, _ = x.Apply(engineA, 0, one, began)
		_, _ = x.Apply(engineA, 1, two, began)
		_, _ = x.Apply(engineA, 1, one, began) // a restart
		_ = x.Replayed(engineA, 0, two, began)
		x.ReplayEnd(engineA, true, began)
		x.Match(&Query{Model: "m", Tokens: append(p, 1)}, nil)

		checkBooks(t, x)
	})
}

// checkBooks compares what is known of engineA in its several tables, and that nothing stays when it is forgotten.
func checkBooks(t *testing.T, x *Index) {
	t.Helper()
	s := x.find(engineA)
	blocks := 0
	for _, c := range s.columns {
		n, ghosts := 0, 0
		for i, key := range c.refs.keys {
			if key != 0 {
				n++
			}
			if key != 0 && c.refs.counts[i] > 0 {
				require.NotZero(t, c.page.columns(key)&c.bit)
			} else if key != 0 {
				ghosts++
			}
		}
		require.Equal(t, n, c.refs.used)
		require.Equal(t, ghosts, c.refs.ghosts)
		require.Equal(t, c.refs.closed(), c.page.open.Load()&c.bit == 0)
		blocks += n
	}
	require.Equal(t, blocks, s.blocks)
	require.LessOrEqual(t, blocks, 1001)
	pages := slices.Clone(s.model.pages)
	x.Forget("a")
	for _, p := range pages {
		for i := range p.shards {
			require.Zero(t, p.shards[i].live)
		}
	}
}
