// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/decide"
)

// busy are the figures of an engine of a fleet where all of them are busy, as package decide rounds them.
func busy(r *rand.Rand, decodes bool) decide.Candidate {
	short := func(from, to int) int {
		v := from + r.IntN(to-from)
		cut := max(bits.Len(uint(v))-codeBits, 0)
		return v >> cut << cut
	}
	c := decide.Candidate{
		QueueTokens: short(8192, 65_536), Moving: short(8192, 32_768),
		KV:    decide.Memory{Free: short(30_000, 400_000), Total: 411_200},
		Speed: decide.Speed{Base: 6.83e-3, PerRequest: 4.42e-6, PerContext: 76.2e-9, PerPrompt: 31.4e-6},
		Age:   time.Duration(r.IntN(100)) * ageUnit, Cached: short(500, 8192), CachedExact: true, Alone: decodes,
	}
	if decodes {
		c.Queue, c.Running, c.Coming, c.ComingContext = r.IntN(8), 20+r.IntN(40), r.IntN(8), short(1000, 16_384)
		c.Context, c.Prefilled, c.QueueTokens = short(20_000, 160_000), float64(short(512, 4096)), short(1024, 8192)
	}
	return c
}

func busyFleet(r *rand.Rand, n int) *decide.Recorded {
	x := &decide.Recorded{Attempt: 1}
	for i := range n {
		x.Input.Prefill = append(x.Input.Prefill, busy(r, false))
		x.Engines[0] = append(x.Engines[0], fmt.Sprintf("10.0.0.%d:8000", i))
		x.Input.Decode = append(x.Input.Decode, busy(r, true))
		x.Engines[1] = append(x.Engines[1], fmt.Sprintf("10.0.1.%d:8000", i))
	}
	x.Input.Prompt, x.Input.Limit, x.Input.Rand = 7843, 8192, 54_321
	x.Input.TokenBytes, x.Input.Link = 131_072, 2.5e9
	x.Decision = decide.Decision{Action: decide.DecodeAlone, Prefill: decide.Any, Decode: n - 1, TTFT: 1_274_318_226,
		ITL: 31_417_333, Reason: decide.ReasonInterference}
	if n > 0 {
		x.Decode = x.Engines[1][n-1]
	}
	x.Result = decide.Result{TTFT: 1_312_400_000, ITL: 33_120_000, Took: 18_412_000_000, Output: 512, Cached: 4096}
	return x
}

func longPrompt(r *rand.Rand, bytes int) *beginnings {
	b := &beginnings{size: bytes}
	for size := block; size <= bytes && b.n < levelsMost; size *= 2 {
		b.bits[b.n] = r.Uint64() & (1<<levelBits(b.n) - 1)
		b.n++
	}
	return b
}

// file writes decisions as a Recorder does.
func written(t testing.TB, all ...*decide.Recorded) (text string, last int) {
	t.Helper()
	e := newEncoder()
	require.NoError(t, e.header(&Header{Version: Version, Began: time.Unix(1e9, 0).UTC()}))
	out := bytes.Clone(e.out)
	for _, x := range all {
		require.True(t, e.entry(81_204*time.Millisecond, x, longPrompt(rand.New(rand.NewPCG(1, 1)), 30_000)))
		out = append(out, e.out...)
		last = len(e.out)
	}
	return string(out), last
}

func readAll(t testing.TB, text string) (entries []*Entry, faults []string) {
	t.Helper()
	_, all, err := Read(strings.NewReader(text))
	require.NoError(t, err)
	for e, err := range all {
		if err != nil {
			faults = append(faults, err.Error())
			continue
		}
		entries = append(entries, e)
	}
	return entries, faults
}

// Eight and eight engines that are all busy, and a prompt of 30 KB.
func TestALineHasAtMost400Bytes(t *testing.T) {
	longest := 0
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 7))
		x := busyFleet(r, 8)
		text, _ := written(t, x, x)
		lines := strings.SplitAfter(strings.TrimSpace(text), "\n")
		last := lines[len(lines)-1]
		longest = max(longest, len(last)+1)
		entries, faults := readAll(t, text)
		require.Empty(t, faults)
		require.Len(t, entries, 2)
		require.Len(t, entries[1].Prefixes, 7, "no prefix is left out for it")
	}
	t.Logf("longest: %d bytes", longest)
	assert.LessOrEqual(t, longest, lineMost)
}

func TestWhatIsReadIsWhatWasWritten(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 3))
		x := busyFleet(r, r.IntN(9))
		if r.IntN(3) == 0 { // a host's figures may be anything
			for i := range x.Input.Decode {
				c := &x.Input.Decode[i]
				c.Context, c.Moving, c.Cached, c.Queue = int(r.Uint64()), -5, math.MaxInt, math.MinInt
				c.Prefilled, c.Apart, c.Age = r.NormFloat64(), r.Uint64(), time.Duration(r.Int64())
				c.Speed.Base = r.Float64()
				c.KV.Total = 0
			}
			x.Input.Class = decide.Class{TTFT: -1, ITL: time.Duration(r.Int64()), Refusable: true}
			x.Decision.RetryAfter, x.Decision.Prefill, x.Attempt = -7, 1<<30, 3
			x.Decision.Reason, x.Instead, x.Result.Error = "a \"host's\"\nown", "dry_run", "decode_failed"
			x.Prefill = "elsewhere"
			x.Decode = ""
		}
		e := newEncoder()
		b := longPrompt(r, r.IntN(1<<20))
		require.NoError(t, e.header(&Header{Version: Version, Began: time.Unix(1e9, 0).UTC()}))
		text := string(e.out)
		ok := e.entry(-81_204*time.Millisecond, x, b)
		entries, faults := readAll(t, text+string(e.out))
		require.Empty(t, faults)
		if !ok {
			require.Empty(t, entries)
			continue
		}
		require.Len(t, entries, 1)
		got := *entries[0]
		assert.Len(t, got.Prefixes, b.n)
		assert.Equal(t, -81_204*time.Millisecond, got.At)
		got.Time = x.Time
		require.Equal(t, *x, got.Recorded)
	}
}
