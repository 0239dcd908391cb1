// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"encoding/hex"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var engineA = Source{Engine: "a", Model: "m"}

// feed applies events to a source from its first batch on, each in a batch of its own.
func feed(t *testing.T, x *Index, src Source, events ...any) {
	t.Helper()
	from, _ := x.ReplayFrom(src)
	seq := from
	if status := x.State(src.Engine); status.State != Unknown || from > 0 {
		seq++
	}
	for i, e := range events {
		_, err := x.Apply(src, seq+uint64(i), message(e), began)
		require.NoError(t, err)
	}
}

// held returns how many tokens of a prompt, to which one more is added, an engine holds.
func held(x *Index, engine string, q Query) (h Hit) {
	q.Model, q.Tokens = "m", append(slices.Clone(q.Tokens), 1)
	for _, hit := range x.Match(&q, nil) {
		if hit.Engine == engine {
			h = hit
		}
	}
	return h
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.NewReplacer(" ", "", "\n", "", "\t", "").Replace(s))
	require.NoError(t, err)
	return b
}

const block0 = "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682"

// The vectors were made by hand from the structs of vLLM 0.33.0 (vllm/distributed/kv_events.py).
func TestTheBytesOfVLLMAreRead(t *testing.T) {
	x := New()
	first := make([]uint32, 16)
	for i := range first {
		first[i] = uint32(i + 1)
	}
	stored := unhex(t, `93 cb3ff8000000000000 91 8b
		a474797065 ab426c6f636b53746f726564
		ac626c6f636b5f686173686573 91 c420`+block0+`
		b1706172656e745f626c6f636b5f68617368 c0
		a9746f6b656e5f696473 dc0010 0102030405060708090a0b0c0d0e0f10
		aa626c6f636b5f73697a65 10   a76c6f72615f6964 c0   a66d656469756d a3475055   a96c6f72615f6e616d65 c0
		aa65787472615f6b657973 91c0   a967726f75705f696478 00
		b26b765f63616368655f737065635f6b696e64 ae66756c6c5f617474656e74696f6e
		00`)
	assert.Len(t, stored, 227)
	replay, err := x.Apply(engineA, 0, stored, began)
	require.NoError(t, err)
	assert.False(t, replay)
	assert.Equal(t, Hit{Engine: "a", Device: 16, Tokens: 16, Exact: true}, held(x, "a", Query{Tokens: first}))
	assert.Equal(t, Status{State: Exact, Since: began, Heard: began}, x.State("a"))

	_, err = x.Apply(engineA, 1, unhex(t, `93 cb3ff8000000000000 91 84 a474797065 ac426c6f636b52656d6f766564
		ac626c6f636b5f686173686573 91 c420`+block0+` a66d656469756d a3475055 a967726f75705f696478 00 00`), began)
	require.NoError(t, err)
	assert.Zero(t, held(x, "a", Query{Tokens: first}))

	_, err = x.Apply(engineA, 2, stored, began)
	require.NoError(t, err)
	assert.NotZero(t, held(x, "a", Query{Tokens: first}))
	_, err = x.Apply(engineA, 3, unhex(t,
		`93 cb3ff8000000000000 91 81 a474797065 b0416c6c426c6f636b73436c6561726564 00`), began)
	require.NoError(t, err)
	assert.Zero(t, held(x, "a", Query{Tokens: first}))
	assert.Equal(t, Exact, x.State("a").State)
}

// TensorRT-LLM over ZeroMQ (#17023, _torch/pyexecutor/kv_cache_events.py): vLLM's maps, without groups and with signed
// hashes.
func TestTheStreamOfTensorRTLLMIsRead(t *testing.T) {
	x, p := New(), tokensOf(64, 1)
	for seq, e := range []pairs{
		{"type", "BlockStored", "block_hashes", []any{-5, 7}, "parent_block_hash", nil, "token_ids", p,
			"block_size", 32, "lora_id", nil, "medium", "GPU", "lora_name", nil},
		{"type", "BlockRemoved", "block_hashes", []any{7}, "medium", "GPU"},
	} {
		_, err := x.Apply(Source{Engine: "a", Model: "m", Rank: 1}, uint64(seq),
			wire(nil).put([]any{1.5, []any{e}, 1}), began)
		require.NoError(t, err)
		assert.Equal(t, Hit{Engine: "a", Rank: 1, Device: 64 - 32*seq, Tokens: 64 - 32*seq, Exact: true},
			held(x, "a", Query{Tokens: p}))
	}
}

func TestEachFormOfAnEventIsRead(t *testing.T) {
	p := tokensOf(32, 1)
	two := []u64{1 << 63, 7}
	for name, payload := range map[string][]byte{
		"maps": message(storedEvent(two, nil, p, 16)),
		"arrays": message([]any{"BlockStored", two, nil, p, 16, nil, "GPU", nil, []any{nil, nil}, 0, "full_attention",
			nil,
			"LOCAL", nil, "session", nil, "of tomorrow"}),
		"short arrays": message([]any{"BlockStored", two, nil, p, 16}),
		"a map of maps": wire(nil).put(pairs{"data_parallel_rank", 0, "events", []any{storedEvent(two, nil, p, 16)},
			"ts", 1.5}),
		"no rank":    wire(nil).put([]any{1, []any{storedEvent(two, nil, p, 16)}}),
		"more in it": wire(nil).put([]any{1.5, []any{storedEvent(two, nil, p, 16)}, 0, pairs{"x", 1}}),
		"unknown fields": message(storedEvent(two, nil, p, 16, "of_tomorrow", pairs{"a", []any{1, "b"}}, "extension",
			raw{0xd4, 1, 2})),
		"unknown events": message(pairs{"type", "BlockMigrated", "block_hashes", two}, []any{"Other", 1}, []any{},
			pairs{},
			"text", 5, storedEvent(two, nil, p, 16)),
		"any order": message(pairs{"token_ids", p, "block_size", 16, "parent_block_hash", nil, "block_hashes", two,
			"type", "BlockStored"}),
	} {
		t.Run(name, func(t *testing.T) {
			x := New()
			_, err := x.Apply(engineA, 0, payload, began)
			require.NoError(t, err)
			assert.Equal(t, Hit{Engine: "a", Device: 32, Tokens: 32, Exact: true}, held(x, "a", Query{Tokens: p}))
			removed := removedEvent(two[1:])
			if name == "arrays" {
				removed = removedEvent(two[1:], "medium", "GPU", "group_idx", 0)
			}
			feed(t, x, engineA, removed)
			assert.Equal(t, 16, held(x, "a", Query{Tokens: p}).Tokens)
			assert.Equal(t, Exact, x.State("a").State)
		})
	}
}

func TestHashesComeInEachForm(t *testing.T) {
	p := tokensOf(48, 1)
	for name, h := range map[string][]any{
		"unsigned": {u64(1 << 63), u64(2), 3},
		"signed":   {-5, -6, -7}, // SGLang
		"bytes": {bin("0123456789abcdef0123456789abcdef"), bin("1123456789abcdef0123456789abcdef"),
			bin("0123456789abcdee")},
	} {
		t.Run(name, func(t *testing.T) {
			x := New()
			feed(t, x, engineA,
				pairs{"type", "BlockStored", "block_hashes", h[:2], "parent_block_hash", nil, "token_ids", p[:32],
					"block_size", 16},
				pairs{"type", "BlockStored", "block_hashes", h[2:], "parent_block_hash", h[1], "token_ids", p[32:],
					"block_size", 16})
			assert.Equal(t, 48, held(x, "a", Query{Tokens: p}).Tokens)
			feed(t, x, engineA, pairs{"type", "BlockRemoved", "block_hashes", h[1:2]})
			assert.Equal(t, 16, held(x, "a", Query{Tokens: p}).Tokens)
			assert.Equal(t, Exact, x.State("a").State)
		})
	}
}

// vLLM does not deduplicate: two requests that compute a prompt at once store it twice, and each copy is evicted.
func TestABlockIsHeldUntilItIsRemovedAsOftenAsItWasStored(t *testing.T) {
	x, p := New(), tokensOf(16, 1)
	feed(t, x, engineA, storedEvent([]u64{1}, nil, p, 16), storedEvent([]u64{1}, nil, p, 16), removedEvent([]u64{1}))
	assert.Equal(t, 16, held(x, "a", Query{Tokens: p}).Tokens)
	feed(t, x, engineA, removedEvent([]u64{1}))
	assert.Zero(t, held(x, "a", Query{Tokens: p}))
	assert.Equal(t, Exact, x.State("a").State)
}

// Two fields that are proposed for vLLM (vllm-project/vllm#51699 and #48933).
func TestReusedBlocksAndRemainingCopiesAreCountedAsTold(t *testing.T) {
	x, p := New(), tokensOf(16, 1)
	feed(t, x, engineA, storedEvent([]u64{1}, nil, p, 16, "origin", "NEW"), storedEvent([]u64{1}, nil, p, 16, "origin",
		"REUSED"),
		removedEvent([]u64{1}))
	assert.Zero(t, held(x, "a", Query{Tokens: p}))
	feed(t, x, engineA, storedEvent([]u64{1}, nil, p, 16), storedEvent([]u64{1}, nil, p, 16),
		removedEvent([]u64{1}, "remaining_copy_counts", []any{0}))
	assert.Zero(t, held(x, "a", Query{Tokens: p}))
	feed(t, x, engineA, storedEvent([]u64{1}, nil, p, 16), removedEvent([]u64{1}, "remaining_copy_counts", []any{1}))
	assert.Equal(t, 16, held(x, "a", Query{Tokens: p}).Tokens)
}

// Hashes of an engine can differ by what its events do not tell, as a LoRA's path.
func TestTwoHashesOfOneBlockAreTwoCopies(t *testing.T) {
	x, p := New(), tokensOf(16, 1)
	feed(t, x, engineA, storedEvent([]u64{1}, nil, p, 16), storedEvent([]u64{2}, nil, p, 16), storedEvent([]u64{3}, nil,
		p, 16),
		removedEvent([]u64{1}), removedEvent([]u64{3}))
	assert.Equal(t, 16, held(x, "a", Query{Tokens: p}).Tokens)
	feed(t, x, engineA, removedEvent([]u64{2}))
	assert.Zero(t, held(x, "a", Query{Tokens: p}))
}

func TestTenantsAndAdaptersHaveBlocksOfTheirOwn(t *testing.T) {
	x, p := New(), tokensOf(32, 1)
	feed(t, x, engineA,
		storedEvent([]u64{1, 2}, nil, p, 16, "lora_name", "ada", "extra_keys", []any{[]any{"ada"}, []any{"ada"}}),
		storedEvent([]u64{3, 4}, nil, p, 16, "extra_keys", []any{[]any{"salty"}, nil}),
		storedEvent([]u64{5, 6}, nil, p, 16, "lora_name", "ada", "extra_keys", []any{[]any{"ada", "salty2"},
			[]any{"ada"}}),
		storedEvent([]u64{7, 8}, nil, p, 16, "cache_salt", "sglang"),
	)
	for _, q := range []Query{{LoRA: "ada"}, {Salt: "salty"}, {LoRA: "ada", Salt: "salty2"}, {Salt: "sglang"}} {
		q.Tokens = p
		assert.Equal(t, 32, held(x, "a", q).Tokens, q)
	}
	for _, q := range []Query{{}, {LoRA: "bob"}, {Salt: "ada"}, {LoRA: "ada", Salt: "salty"}, {Salt: "salty2"},
		{LoRA: "salty"}} {
		q.Tokens = p
		assert.Zero(t, held(x, "a", q), q)
	}
	assert.Empty(t, x.Match(&Query{Model: "another", Tokens: p}, nil))
}

func TestImagesArePartOfABlock(t *testing.T) {
	x, p := New(), tokensOf(64, 1)
	feed(t, x, engineA, storedEvent([]u64{1, 2, 3, 4}, nil, p, 16, "extra_keys",
		[]any{[]any{[]any{"cat", 10}, "salty"}, []any{[]any{"cat", -6}, []any{"dog", 14}}, []any{[]any{"dog", -2}},
			nil}))
	q := Query{Tokens: p, Salt: "salty", Media: []Media{{Key: "cat", Offset: 10, Length: 10}, {Key: "dog", Offset: 30,
		Length: 8}}}
	assert.Equal(t, 64, held(x, "a", q).Tokens)
	q.Media[1].Key = "fox"
	assert.Equal(t, 16, held(x, "a", q).Tokens)
	q.Media = nil
	assert.Zero(t, held(x, "a", q))
}

func TestBlocksOfAnySizeAreFound(t *testing.T) {
	for _, size := range []int{1, 7, 8, 16, 24, 64, 256} {
		x, p := New(), tokensOf(1024, 1)
		n := len(p) / size
		hashes := make([]u64, n)
		for i := range hashes {
			hashes[i] = u64(i + 1)
		}
		half := n / 2
		feed(t, x, engineA, storedEvent(hashes[:half], nil, p[:half*size], size),
			storedEvent(hashes[half:], hashes[half-1], p[half*size:n*size], size))
		assert.Equal(t, n*size, held(x, "a", Query{Tokens: p}).Tokens, size)
		feed(t, x, engineA, removedEvent(hashes[1:2]))
		assert.Equal(t, size, held(x, "a", Query{Tokens: p}).Tokens, size)
	}
}

// An engine computes the last token of a prompt in any case: vLLM and SGLang look for one token less.
func TestTheLastTokenIsNeverHeld(t *testing.T) {
	x, p := New(), tokensOf(32, 1)
	feed(t, x, engineA, storedEvent([]u64{1, 2}, nil, p, 16))
	hits := x.Match(&Query{Model: "m", Tokens: p}, nil)
	assert.Equal(t, 16, hits[0].Tokens)
	for n := range 17 {
		assert.Empty(t, x.Match(&Query{Model: "m", Tokens: p[:n]}, nil))
	}
}

func TestTiersAreTold(t *testing.T) {
	x, p := New(), tokensOf(512, 1)
	h := make([]u64, 32)
	for i := range h {
		h[i] = u64(i + 1)
	}
	feed(t, x, engineA,
		storedEvent(h, nil, p, 16, "medium", "GPU"),
		storedEvent([]u64{100, 101}, nil, p, 256, "medium", "cpu"), // LMCache's chunks
		storedEvent(h[:8], nil, nil, 16, "medium", "STORAGE"),      // copied, and told without tokens
		removedEvent(h[4:], "medium", "GPU"))
	assert.Equal(t, Hit{Engine: "a", Device: 64, Tokens: 512, Tier: TierHost, Exact: true}, held(x, "a",
		Query{Tokens: p}))
	feed(t, x, engineA, removedEvent([]u64{100}, "medium", "cpu"))
	assert.Equal(t, Hit{Engine: "a", Device: 64, Tokens: 128, Tier: TierStorage, Exact: true}, held(x, "a",
		Query{Tokens: p}))
	feed(t, x, engineA, removedEvent(h[2:3], "medium", "STORAGE"))
	assert.Equal(t, Hit{Engine: "a", Device: 64, Tokens: 64, Exact: true}, held(x, "a", Query{Tokens: p}))
}

func TestOnlyGroupsThatKeepEveryTokenCount(t *testing.T) {
	x, p := New(), tokensOf(64, 1)
	h := []u64{1, 2, 3, 4}
	group := func(n int, kind string) []any {
		return []any{"medium", "GPU", "group_idx", n, "kv_cache_spec_kind", kind}
	}
	feed(t, x, engineA,
		storedEvent(h, nil, p, 16, group(0, "full_attention")...),
		storedEvent(h, nil, p, 16, group(1, "sliding_window")...),
		storedEvent(h[2:], nil, p, 16, group(1, "sliding_window")...), // its masked blocks have no hash
		removedEvent(h[:2], "medium", "GPU", "group_idx", 1),
		storedEvent(h[:3], nil, p[:48], 16, group(2, "mla_attention")...))
	assert.Equal(t, 48, held(x, "a", Query{Tokens: p}).Tokens, "what all groups hold")
	assert.Equal(t, Exact, x.State("a").State)
	feed(t, x, engineA, removedEvent(h[1:2], "medium", "GPU", "group_idx", 0))
	assert.Equal(t, 16, held(x, "a", Query{Tokens: p}).Tokens)
	assert.Equal(t, Exact, x.State("a").State)
}

func TestTokensAfterABlockBelongToIt(t *testing.T) {
	p := tokensOf(65, 1)
	h := []u64{1, 2, 3, 4}
	var list []any
	for i := range 64 {
		list = append(list, []any{int(p[i]), int(p[i+1])})
	}
	ahead := make([]any, 4)
	for i := range ahead {
		ahead[i] = p[16*(i+1) : 16*(i+1)+1]
	}
	for name, e := range map[string]pairs{
		"pairs of SGLang": {"type", "BlockStored", "block_hashes", h, "parent_block_hash", nil, "token_ids", list,
			"block_size", 16},
		"vLLM": storedEvent(h, nil, p[:64], 16, "lookahead_token_ids", ahead),
	} {
		t.Run(name, func(t *testing.T) {
			x := New()
			feed(t, x, engineA, e)
			assert.Equal(t, 64, held(x, "a", Query{Tokens: p}).Tokens)
			assert.Equal(t, Exact, x.State("a").State)
			zero := slices.Clone(p)
			zero[16] = 0
			assert.Zero(t, held(x, "a", Query{Tokens: zero}).Tokens)
			other := slices.Clone(p)
			other[48]++
			assert.Equal(t, 32, held(x, "a", Query{Tokens: other}).Tokens)
			assert.Equal(t, 48, held(x, "a", Query{Tokens: p[:63]}).Tokens)
		})
	}
}

// TensorRT-LLM has texts among the tokens of images.
func TestTokensThatAreNoNumbersMatchNothing(t *testing.T) {
	x, p := New(), tokensOf(48, 1)
	odd := make([]any, 48)
	for i := range odd {
		odd[i] = int(p[i])
	}
	odd[20] = "image"
	feed(t, x, engineA, pairs{"type", "BlockStored", "block_hashes", []u64{1, 2, 3}, "parent_block_hash", nil,
		"token_ids", odd,
		"block_size", 16})
	assert.Equal(t, 16, held(x, "a", Query{Tokens: p}).Tokens)
	feed(t, x, engineA, removedEvent([]u64{3}), removedEvent([]u64{1, 2}))
	assert.Equal(t, Exact, x.State("a").State)
}

func TestWhatCannotBePlacedMakesTheViewIncomplete(t *testing.T) {
	p := tokensOf(64, 1)
	for name, c := range map[string]struct {
		event  any
		reason string
	}{
		"unknown parent":  {storedEvent([]u64{5}, u64(77), p[:16], 16), unusableParent},
		"too many tokens": {storedEvent([]u64{5}, nil, p, 16), unusableLengths},
		"too few tokens":  {storedEvent([]u64{5, 6, 7, 8, 9}, nil, p, 16), unusableLengths},
		"no block size":   {storedEvent([]u64{5}, nil, p[:16], 0), unusableLengths},
		"no tokens":       {storedEvent([]u64{5}, nil, nil, 16), unusableTokens},
		"no hashes":       {pairs{"type", "BlockStored", "token_ids", p, "block_size", 16}, unusableLengths},
		"strange hashes": {pairs{"type", "BlockStored", "block_hashes", []any{1.5}, "token_ids", p[:16],
			"block_size", 16}, unusableHash},
		"two blocks, a hash": {storedEvent([]u64{1}, nil, p[16:32], 16), unusableHash},
		"pairs that differ": {pairs{"type", "BlockStored", "block_hashes", []u64{9}, "token_ids", []any{[]any{1, 2},
			[]any{3, 4}}, "block_size", 2}, unusableTokens},
		"extra keys": {storedEvent([]u64{5}, nil, p[:16], 16, "extra_keys", []any{nil, nil}),
			unusableExtraKey},
		"unknown removal":    {removedEvent([]u64{5}), unusableRemoved},
		"removal, no hashes": {pairs{"type", "BlockRemoved"}, unusableHash},
		"an unknown kind": {storedEvent([]u64{5}, nil, p[:16], 16, "group_idx", 3, "kv_cache_spec_kind", "unknown"),
			unusableKind},
		"a group far away": {storedEvent([]u64{5}, nil, p[:16], 16, "group_idx", 64), unusableTooMany},
		"lookahead is short": {
			storedEvent([]u64{5, 6}, nil, p[:32], 16, "lookahead_token_ids", []any{[]any{1}}),
			unusableTokens,
		},
		"lookahead is uneven": {storedEvent([]u64{5, 6}, nil, p[:32], 16, "lookahead_token_ids", []any{[]any{1},
			[]any{}}), unusableTokens},
	} {
		t.Run(name, func(t *testing.T) {
			x := New()
			feed(t, x, engineA, storedEvent([]u64{1}, nil, p[:16], 16), c.event)
			assert.Equal(t, Status{State: Incomplete, Reason: c.reason, Since: began, Heard: began}, x.State("a"))
			assert.Equal(t, Hit{Engine: "a", Device: 16, Tokens: 16}, held(x, "a", Query{Tokens: p}))
			feed(t, x, engineA, clearedEvent)
			assert.Equal(t, Exact, x.State("a").State, "nothing is held now, and nothing is missing")
		})
	}
	t.Run("in another medium", func(t *testing.T) {
		x := New()
		feed(t, x, engineA, storedEvent([]u64{1}, nil, p[:16], 16), storedEvent([]u64{5}, u64(77), p[:16], 16, "medium",
			"CPU"),
			storedEvent([]u64{6}, nil, nil, 0, "medium", "CPU"), removedEvent([]u64{8}, "medium", "CPU"))
		assert.Equal(t, Exact, x.State("a").State, "it tells of device memory")
	})
}

func TestBlocksAboveTheBoundAreLeftOut(t *testing.T) {
	x, p := New(WithMaxBlocks(2)), tokensOf(64, 1)
	feed(t, x, engineA, storedEvent([]u64{1, 2, 3, 4}, nil, p, 16))
	assert.Equal(t, 32, held(x, "a", Query{Tokens: p}).Tokens)
	assert.Equal(t, unusableTooMany, x.State("a").Reason)
}

func TestAnEngineHasAtMostSoManyMedia(t *testing.T) {
	x, p := New(), tokensOf(16, 1)
	for i := range 40 {
		feed(t, x, engineA, storedEvent([]u64{1}, nil, p, 16, "medium", string(rune('A'+i))))
	}
	assert.Len(t, (*x.models.Load())["m"].columns, 1)
	for _, columns := range (*x.models.Load())["m"].columns {
		assert.Len(t, columns, columnsMost)
	}
}

func TestABatchThatIsNoneIsAnError(t *testing.T) {
	good := message(storedEvent([]u64{1}, nil, tokensOf(16, 1), 16))
	for _, payload := range [][]byte{nil, {}, {0xc0}, {0xc1}, {0x93}, []byte("text"), wire(nil).put([]any{1.5}),
		wire(nil).put(pairs{"ts", 1}),
		wire(nil).put([]any{1.5, "no list"}), {0x92, 0, 0xdd, 0xff, 0xff, 0xff, 0xff}, {0xdf, 0xff, 0xff, 0xff, 0xff},
		good[:len(good)-2],
		good[:40]} {
		x := New()
		_, err := x.Apply(engineA, 0, payload, began)
		require.ErrorIs(t, err, errPayload)
		assert.Equal(t, reasonPayload, x.State("a").Reason)
		_, err = x.Apply(engineA, 1, message(clearedEvent), began.Add(time.Second))
		require.NoError(t, err)
		assert.Equal(t, Status{State: Exact, Since: began.Add(time.Second), Heard: began.Add(time.Second)},
			x.State("a"))
	}
}

// Engines evict the end of a prompt first. Where one does not, Match looks at each block, until nothing follows the
// gap.
func TestAGapInAPrefixIsSeenAndForgotten(t *testing.T) {
	x, p := New(), tokensOf(16*40, 1)
	h := make([]u64, 40)
	for i := range h {
		h[i] = u64(i + 1)
	}
	feed(t, x, engineA, storedEvent(h, nil, p, 16))
	c := x.find(engineA).columns[0]
	closed := func(want bool) {
		t.Helper()
		assert.Equal(t, want, c.refs.closed())
		assert.Equal(t, want, c.page.open.Load() == 0)
	}
	tokens := func(want int) {
		t.Helper()
		assert.Equal(t, 16*want, held(x, "a", Query{Tokens: p}).Tokens)
	}
	closed(true)
	tokens(40)
	feed(t, x, engineA, removedEvent(h[38:39]), removedEvent(h[2:5]))
	closed(false)
	tokens(2)
	feed(t, x, engineA, storedEvent(h[2:4], h[1], p[32:64], 16))
	closed(false)
	tokens(4)
	feed(t, x, engineA, storedEvent(h[4:5], h[3], p[64:80], 16))
	closed(false)
	tokens(38)
	feed(t, x, engineA, removedEvent(h[39:]))
	closed(true)
	tokens(38)
	assert.Equal(t, 38, c.refs.used)

	feed(t, x, engineA, removedEvent(h[10:11]))
	closed(false)
	feed(t, x, engineA, storedEvent([]u64{99}, h[10], tokensOf(16, 7), 16)) // its parent is known, though it is gone
	assert.Equal(t, Exact, x.State("a").State)
	feed(t, x, engineA, removedEvent(h[11:38]), removedEvent([]u64{99}))
	closed(true)
	tokens(10)
	assert.Equal(t, 10, c.refs.used)
}

func TestTimesThatAreNoneTellNothing(t *testing.T) {
	for _, sent := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -5, 1e300} {
		x := New()
		payload := wire(nil).put([]any{sent, []any{clearedEvent}})
		for seq := range uint64(3) {
			_, err := x.Apply(engineA, seq, payload, began)
			require.NoError(t, err)
		}
		assert.Equal(t, Status{State: Exact, Since: began, Heard: began}, x.State("a"))
	}
}

func TestLookaheadThatIsNoNumberMatchesNothing(t *testing.T) {
	x, p := New(), tokensOf(16, 1)
	feed(t, x, engineA, storedEvent([]u64{1}, nil, p, 16, "lookahead_token_ids", []any{[]any{"image"}}))
	assert.Zero(t, held(x, "a", Query{Tokens: append(p, 0)}))
	assert.Equal(t, Exact, x.State("a").State)
}

// A block may be told to be in a medium after one that follows it, and still be without the one before it.
func TestABlockIsNoPrefixWhateverOrderItsMediumIsToldIn(t *testing.T) {
	x, p := New(), tokensOf(48, 1)
	feed(t, x, engineA, storedEvent([]u64{1, 2, 3}, nil, p, 16),
		storedEvent([]u64{3}, nil, nil, 16, "medium", "CPU"), storedEvent([]u64{2}, nil, nil, 16, "medium", "CPU"),
		removedEvent([]u64{3, 2, 1}))
	assert.Zero(t, held(x, "a", Query{Tokens: p}), "block 1 is in no medium")
	feed(t, x, engineA, storedEvent([]u64{1}, nil, p[:16], 16, "medium", "CPU"))
	assert.Equal(t, 48, held(x, "a", Query{Tokens: p}).Tokens)
	feed(t, x, engineA, removedEvent([]u64{1, 2, 3}, "medium", "CPU"))
	assert.Zero(t, x.find(engineA).blocks)
}
