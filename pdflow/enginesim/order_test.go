// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

// TestDecodeInAnotherOrderThanPrefill: requests that leave P as A, B, C arrive at
// D as C, B, A, and all at once.
func TestDecodeInAnotherOrderThanPrefill(t *testing.T) {
	s := newScene(t)
	const requests = 12
	bodies, handoffs, want := make([]obj, requests), make([]obj, requests), make([]string, requests)
	prepare := func(round string) {
		for i := range requests {
			bodies[i] = completion(fmt.Sprint(round, " request ", i))
			handoffs[i] = s.prefill(completions, bodies[i])
			want[i] = s.alone(completions, bodies[i])
		}
	}
	prepare("backwards")
	for i := requests - 1; i >= 0; i-- {
		assert.Equal(t, want[i], s.decode(completions, bodies[i], handoffs[i]).text())
	}
	prepare("together")
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() { assert.Equal(t, want[i], s.decode(completions, bodies[i], handoffs[i]).text()) })
	}
	wg.Wait()
	assert.NoError(t, s.p.CheckKV())
	assert.NoError(t, s.d.CheckKV())
	assert.EqualValues(t, 2*requests*240, s.d.Stats().ExternalKVTransfer)
}

// TestManyClientsOnASmallCache: blocks are reused all the time, requests wait in
// line and are preempted, and every text is right.
func TestManyClientsOnASmallCache(t *testing.T) {
	s := newScene(t, func(p, d *enginesim.Config) {
		p.Blocks, p.MaxModelLen, p.BlockSize = 36, 576, 16
		d.ITL = 300 * time.Microsecond
	})
	var wg sync.WaitGroup
	for c := range 6 {
		wg.Go(func() {
			for i := range 4 {
				body := with(completion(fmt.Sprint("client ", c, " request ", i)), obj{"max_tokens": 60})
				h := s.prefill(completions, body)
				a := s.decode(completions, body, h)
				if assert.Equal(t, 200, a.status, a.body) {
					assert.Equal(t, s.alone(completions, body), a.text())
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, s.p.WaitIdle(t.Context()))
	require.NoError(t, s.d.WaitIdle(t.Context()))
	assert.NoError(t, s.p.CheckKV())
	assert.NoError(t, s.d.CheckKV())
	assert.Positive(t, s.d.Stats().Preemptions, "the cache was small enough")
	for _, e := range []*enginesim.Engine{s.p, s.d} {
		assert.Zero(t, e.Stats().UsedBlocks)
	}
}

// TestOneMegabytePrompt moves through P and D like any other.
func TestOneMegabytePrompt(t *testing.T) {
	const size = 1 << 20
	s := newScene(t, func(p, _ *enginesim.Config) {
		p.Blocks, p.MaxModelLen, p.BytesPerToken = size/block+64, size+64, 8
	})
	body := obj{"model": "tiny", "prompt": strings.Repeat("0123456789abcdef", size/16), "max_tokens": 8, "temperature": 0}
	begun := time.Now()
	a := s.decode(completions, body, s.prefill(completions, body))
	t.Log("both legs took", time.Since(begun))
	require.Equal(t, 200, a.status)
	assert.EqualValues(t, size*8, s.d.Stats().BytesTransferred)
	assert.Equal(t, s.alone(completions, body), a.text())
}

// TestTextDependsOnEveryTokenAndSeed: else equal text would prove nothing.
func TestTextDependsOnEveryTokenAndSeed(t *testing.T) {
	s := newScene(t)
	base := completion("x")
	seen := map[string]bool{s.alone(completions, base): true}
	text := base["prompt"].(string)
	for _, at := range []int{0, 1, 31, 32, 33, 100, 224, 238, 239} {
		other := []byte(text)
		other[at] ^= 1
		seen[s.alone(completions, with(base, obj{"prompt": string(other)}))] = true
	}
	assert.Len(t, seen, 10)

	seeded, err := enginesim.Start(enginesim.Config{Seed: 1})
	require.NoError(t, err)
	defer seeded.Close()
	a := s.post(t.Context(), seeded, completions, base)
	assert.False(t, seen[a.text()])
	for _, r := range a.text() {
		assert.True(t, r >= 32 && r < 127, "printable: %q", r)
	}
}

// TestPrefixCache is shared by equal prefixes and equal salts only.
func TestPrefixCache(t *testing.T) {
	s := newScene(t)
	cached := func(more obj) int64 {
		a := s.post(t.Context(), s.o, completions, with(completion("x"), more))
		require.Equal(t, 200, a.status)
		return a.get("usage.prompt_tokens_details.cached_tokens").Int()
	}
	assert.EqualValues(t, 0, cached(nil), "cold")
	assert.EqualValues(t, 224, cached(nil), "all full blocks but the last token's")
	assert.EqualValues(t, 0, cached(obj{"cache_salt": "mine"}), "another salt")
	assert.EqualValues(t, 224, cached(obj{"cache_salt": "mine"}), "the same salt")
	assert.EqualValues(t, 96, cached(obj{"prompt": prompt(240, "x")[:100] + "otherwise"}), "a shared beginning")
	assert.EqualValues(t, 0, cached(obj{"prompt_logprobs": 1}), "prompt logprobs need the prompt computed")
	assert.Len(t, s.alone(completions, completion("x")), 24)
}

// TestPromptLogprobsLeaveTheHandoff to expire: D computes the prompt itself
// (capture 16).
func TestPromptLogprobsLeaveTheHandoff(t *testing.T) {
	for name, more := range map[string]obj{"echo with logprobs": {"echo": true, "logprobs": 1}, "prompt_logprobs": {"prompt_logprobs": 1}} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			body := with(completion("x"), more)
			a := s.decode(completions, body, s.prefill(completions, completion("x")))
			require.Equal(t, 200, a.status, a.body)
			assert.Equal(t, s.alone(completions, body), a.text())
			assert.EqualValues(t, 240, s.d.Stats().LocalCompute)
			assert.Zero(t, s.d.Stats().Transfers)
			assert.Equal(t, 8, s.p.Stats().PinnedBlocks)
		})
	}
}

// TestLatencyModel: a prompt takes its time, a token the ITL, a transfer neither.
func TestLatencyModel(t *testing.T) {
	s := newScene(t, func(p, d *enginesim.Config) {
		p.PrefillRate, d.PrefillRate = 480, 480
		d.ITL = 5 * time.Millisecond
	})
	body := completion("x")
	begun := time.Now()
	h := s.prefill(completions, body)
	assert.GreaterOrEqual(t, time.Since(begun), 500*time.Millisecond)
	begun = time.Now()
	require.Equal(t, 200, s.decode(completions, with(body, obj{"max_tokens": 5}), h).status)
	assert.GreaterOrEqual(t, time.Since(begun), 20*time.Millisecond)
	assert.Less(t, time.Since(begun), 500*time.Millisecond, "nothing was computed")
}

// TestClientLeaving aborts at once, in every phase, and frees the blocks.
func TestClientLeaving(t *testing.T) {
	rows := map[string]struct {
		shape func(p, d *enginesim.Config)
		more  obj
	}{
		"while the prompt is computed": {func(p, _ *enginesim.Config) { p.PrefillRate = 1 }, nil},
		"while tokens are made":        {func(p, _ *enginesim.Config) { p.ITL = time.Hour }, nil},
		"while tokens are streamed":    {func(p, _ *enginesim.Config) { p.ITL = time.Hour }, obj{"stream": true}},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, row.shape)
			ctx, stop := context.WithCancel(t.Context())
			left := make(chan struct{})
			go func() {
				defer close(left)
				s.post(ctx, s.p, completions, with(completion("x"), row.more))
			}()
			waitFor(t, "running", func() bool { return s.p.Stats().Running == 1 })
			stop()
			<-left
			waitFor(t, "abort", func() bool { return s.p.Stats().Aborted == 1 })
			assert.Zero(t, s.p.Stats().UsedBlocks)
			assert.NoError(t, s.p.WaitIdle(t.Context()))
		})
	}
}
