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

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

// TestDecodeInAnotherOrderThanPrefill: requests that leave P as A, B, C arrive at D as C, B, A, and all at once.
func TestDecodeInAnotherOrderThanPrefill(t *testing.T) {
	s := simtest.New(t)
	const requests = 12
	bodies, handoffs, want := make([]simtest.Obj, requests), make([]simtest.Obj, requests), make([]string, requests)
	prepare := func(round string) {
		for i := range requests {
			bodies[i] = simtest.Completion(fmt.Sprint(round, " request ", i))
			handoffs[i] = s.Prefill(bodies[i])
			want[i] = s.Alone(bodies[i])
		}
	}
	prepare("backwards")
	for i := requests - 1; i >= 0; i-- {
		assert.Equal(t, want[i], s.Decode(bodies[i], handoffs[i]).Text())
	}
	prepare("together")
	var wg sync.WaitGroup
	for i := range requests {
		wg.Go(func() { assert.Equal(t, want[i], s.Decode(bodies[i], handoffs[i]).Text()) })
	}
	wg.Wait()
	s.Clean()
	assert.EqualValues(t, 2*requests*240, s.D.Stats().ExternalKVTransfer)
}

// TestManyClientsOnASmallCache: blocks are reused all the time, requests wait in line and are preempted, and every text
// is right.
func TestManyClientsOnASmallCache(t *testing.T) {
	s := simtest.New(t, func(p, d *enginesim.Config) {
		p.Blocks, p.MaxModelLen, p.BlockSize = 36, 576, 16
		d.ITL = 300 * time.Microsecond
	})
	var wg sync.WaitGroup
	for c := range 6 {
		wg.Go(func() {
			// Four each, or as many as it takes until one is preempted.
			for i := 0; i < 4 || i < 100 && s.D.Stats().Preemptions == 0; i++ {
				body := simtest.With(simtest.Completion(fmt.Sprint("client ", c, " request ", i)),
					simtest.Obj{"max_tokens": 60})
				h := s.Prefill(body)
				a := s.Decode(body, h)
				if assert.Equal(t, 200, a.Status, a.Body) {
					s.Right(body, a)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, s.P.WaitIdle(t.Context()))
	require.NoError(t, s.D.WaitIdle(t.Context()))
	s.Clean()
	assert.Positive(t, s.D.Stats().Preemptions, "the cache was small enough")
	for _, e := range []*enginesim.Engine{s.P, s.D} {
		assert.Zero(t, e.Stats().UsedBlocks)
	}
}

// TestOneMegabytePrompt moves through P and D like any other.
func TestOneMegabytePrompt(t *testing.T) {
	const size = 1 << 20
	s := simtest.New(t, func(p, _ *enginesim.Config) {
		p.Blocks, p.MaxModelLen, p.BytesPerToken = size/simtest.Block+64, size+64, 8
	})
	body := simtest.Obj{"model": "tiny", "prompt": strings.Repeat("0123456789abcdef", size/16), "max_tokens": 8,
		"temperature": 0}
	begun := time.Now()
	a := s.Decode(body, s.Prefill(body))
	t.Log("both legs took", time.Since(begun))
	require.Equal(t, 200, a.Status)
	assert.EqualValues(t, size*8, s.D.Stats().BytesTransferred)
	s.Right(body, a)
}

// TestTextDependsOnEveryTokenAndSeed: else equal text would prove nothing.
func TestTextDependsOnEveryTokenAndSeed(t *testing.T) {
	s := simtest.New(t)
	base := simtest.Completion("x")
	seen := map[string]bool{s.Alone(base): true}
	text := base["prompt"].(string)
	for _, at := range []int{0, 1, 31, 32, 33, 100, 224, 238, 239} {
		other := []byte(text)
		other[at] ^= 1
		seen[s.Alone(simtest.With(base, simtest.Obj{"prompt": string(other)}))] = true
	}
	assert.Len(t, seen, 10)

	seeded, err := enginesim.Start(enginesim.Config{Seed: 1})
	require.NoError(t, err)
	defer seeded.Close()
	a := s.Ask(seeded, base)
	assert.False(t, seen[a.Text()])
	for _, r := range a.Text() {
		assert.True(t, r >= 32 && r < 127, "printable: %q", r)
	}
}

// TestPrefixCache is shared by equal prefixes and equal salts only.
func TestPrefixCache(t *testing.T) {
	s := simtest.New(t)
	cached := func(more simtest.Obj) int64 {
		a := s.Ask(s.O, simtest.With(simtest.Completion("x"), more))
		require.Equal(t, 200, a.Status)
		return a.Get("usage.prompt_tokens_details.cached_tokens").Int()
	}
	assert.EqualValues(t, 0, cached(nil), "cold")
	assert.EqualValues(t, 224, cached(nil), "all full blocks but the last token's")
	assert.EqualValues(t, 0, cached(simtest.Obj{"cache_salt": "mine"}), "another salt")
	assert.EqualValues(t, 224, cached(simtest.Obj{"cache_salt": "mine"}), "the same salt")
	assert.EqualValues(t, 96, cached(simtest.Obj{"prompt": simtest.Prompt(240, "x")[:100] + "otherwise"}),
		"a shared beginning")
	assert.EqualValues(t, 0, cached(simtest.Obj{"prompt_logprobs": 1}), "prompt logprobs need the prompt computed")
	assert.Len(t, s.Alone(simtest.Completion("x")), 24)
}

// TestPromptLogprobsLeaveTheHandoff to expire: D computes the prompt itself .
func TestPromptLogprobsLeaveTheHandoff(t *testing.T) {
	for name, more := range map[string]simtest.Obj{"echo with logprobs": {"echo": true, "logprobs": 1},
		"prompt_logprobs": {"prompt_logprobs": 1}} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t)
			body := simtest.With(simtest.Completion("x"), more)
			a := s.Decode(body, s.Prefill(simtest.Completion("x")))
			s.Right(body, a)
			assert.EqualValues(t, 240, s.D.Stats().LocalCompute)
			assert.Zero(t, s.D.Stats().Transfers)
			assert.Equal(t, 8, s.P.Stats().PinnedBlocks)
		})
	}
}

// TestLatencyModel: a prompt takes its time, a token the ITL, a transfer neither.
func TestLatencyModel(t *testing.T) {
	s := simtest.New(t, func(p, d *enginesim.Config) {
		p.PrefillRate, d.PrefillRate = 480, 480
		d.ITL = 5 * time.Millisecond
	})
	body := simtest.Completion("x")
	begun := time.Now()
	h := s.Prefill(body)
	assert.GreaterOrEqual(t, time.Since(begun), 500*time.Millisecond)
	begun = time.Now()
	require.Equal(t, 200, s.Decode(simtest.With(body, simtest.Obj{"max_tokens": 5}), h).Status)
	assert.GreaterOrEqual(t, time.Since(begun), 20*time.Millisecond)
	assert.Zero(t, s.D.Stats().LocalCompute, "nothing was computed, which would take the time of the prompt")
}

// TestClientLeaving aborts at once, in every phase, and frees the blocks.
func TestClientLeaving(t *testing.T) {
	rows := map[string]struct {
		shape func(p, d *enginesim.Config)
		more  simtest.Obj
	}{
		"while the prompt is computed": {func(p, _ *enginesim.Config) { p.PrefillRate = 1 }, nil},
		"while tokens are made":        {func(p, _ *enginesim.Config) { p.ITL = time.Hour }, nil},
		"while tokens are streamed": {func(p, _ *enginesim.Config) { p.ITL = time.Hour },
			simtest.Obj{"stream": true}},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, row.shape)
			ctx, stop := context.WithCancel(t.Context())
			left := s.Later(ctx, s.P, simtest.Completions, simtest.With(simtest.Completion("x"), row.more))
			simtest.WaitFor(t, "running", func() bool { return s.P.Stats().Running == 1 })
			stop()
			<-left
			simtest.WaitFor(t, "abort", func() bool { return s.P.Stats().Aborted == 1 })
			assert.Zero(t, s.P.Stats().UsedBlocks)
			assert.NoError(t, s.P.WaitIdle(t.Context()))
		})
	}
}
