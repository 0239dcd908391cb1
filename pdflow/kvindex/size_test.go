// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"time"
)

// chain is how many blocks a prompt of 32k tokens has.
const chain = 2048

// promptOf is a prompt that one engine of a fleet holds.
func promptOf(engine, number int) []uint32 { return tokensOf(16*chain, engine*1000+number) }

// fleet fills an index: each of the engines holds the shared blocks, and prompts of its own.
func fleet(t testing.TB, engines, blocks int, shared []uint32) *Index {
	t.Helper()
	x := New(WithMaxBlocks(1 << 30))
	payload := wire(nil)
	for e := range engines {
		src := Source{Engine: fmt.Sprintf("e%d", e), Model: "m"}
		seq := uint64(0)
		send := func(tokens []uint32) {
			var parent any
			for len(tokens) > 0 {
				n := min(len(tokens)/16, 128)
				hashes := make([]u64, n)
				for i := range hashes {
					hashes[i] = u64(rand.Uint64())
				}
				payload = payload[:0].put([]any{1.0, []any{storedEvent(hashes, parent, tokens[:16*n], 16)}, 0})
				if _, err := x.Apply(src, seq, payload, began); err != nil {
					t.Fatal(err)
				}
				seq++
				parent, tokens = hashes[n-1], tokens[16*n:]
			}
		}
		send(shared)
		for n, left := 0, blocks-len(shared)/16; left > 0; n, left = n+1, left-chain {
			send(promptOf(e, n)[:16*min(chain, left)])
		}
	}
	return x
}

// live returns the bytes of the heap that are in use.
func live() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// The bar is 10 million entries in 640 MB: BenchmarkTenMillionBlocks has as many, which takes a minute.
func TestABlockTakesLessThan64Bytes(t *testing.T) {
	if raceDetector {
		t.Skip("slow")
	}
	before := live()
	x := fleet(t, 16, 20_000, nil)
	bytes := float64(live()-before) / (16 * 20_000)
	t.Logf("%.1f bytes", bytes)
	if bytes > 64 {
		t.Errorf("%.1f bytes for each block of each engine", bytes)
	}
	if status := x.State("e15"); status.State != Exact {
		t.Error(status)
	}
}

func BenchmarkTenMillionBlocks(b *testing.B) {
	const engines, each = 64, 156_250
	for b.Loop() {
		before := live()
		x := fleet(b, engines, each, nil)
		b.ReportMetric(float64(live()-before)/(engines*each), "B/entry")
		start := time.Now()
		runtime.GC()
		b.ReportMetric(float64(time.Since(start).Microseconds())/1000, "ms/collection")
		var stats debug.GCStats
		debug.ReadGCStats(&stats)
		b.ReportMetric(float64(slices.Min(stats.Pause[:3]).Microseconds()), "µs/pause")
		x.Forget("e0")
	}
}

func BenchmarkMatch32kTokens64Engines(b *testing.B) {
	shared := tokensOf(16*chain/2, 999_999)
	x := fleet(b, 64, 156_250, shared)
	for _, bench := range []struct {
		name   string
		prompt func() []uint32
	}{
		{"HeldByAllForHalfAndByNoneAfter", func() []uint32 {
			return append(shared, tokensOf(8*chain,
				rand.IntN(1e6)+1e6)...)
		}},
		{"HeldByOne", func() []uint32 { return append(promptOf(rand.IntN(64), rand.IntN(75)), 1) }},
		{"HeldByNone", func() []uint32 { return tokensOf(16*chain, rand.IntN(1e6)+1e6) }},
	} {
		// The prompts are made beforehand: their garbage would let the collector run beside Match, and pausing the
		// benchmark's timer stops the world. There are so many that their blocks are in no cache.
		prompts := make([][]uint32, 400)
		for i := range prompts {
			prompts[i] = bench.prompt()
		}
		runtime.GC()
		b.Run(bench.name, func(b *testing.B) {
			var hits []Hit
			times, busy := make([]time.Duration, 0, 1<<20), make([]time.Duration, 0, 1<<20)
			runtime.LockOSThread() // for threadTime, which leaves out what other programs take
			defer runtime.UnlockOSThread()
			b.ReportAllocs()
			for b.Loop() {
				q := &Query{Model: "m", Tokens: prompts[len(times)%len(prompts)]}
				start, cpu := time.Now(), threadTime()
				hits = x.Match(q, hits[:0])
				busy = append(busy, threadTime()-cpu)
				times = append(times, time.Since(start))
			}
			slices.Sort(times)
			slices.Sort(busy)
			for _, q := range []struct {
				unit string
				took time.Duration
			}{{"p50-µs", times[len(times)/2]}, {"p99-µs", times[len(times)*99/100]},
				{"p50-cpu-µs", busy[len(busy)/2]}, {"p99-cpu-µs", busy[len(busy)*99/100]}} {
				b.ReportMetric(float64(q.took.Nanoseconds())/1000, q.unit)
			}
			if len(hits) > 0 {
				b.ReportMetric(float64(hits[0].Tokens), "tokens")
			}
		})
	}
}

func BenchmarkApply(b *testing.B) {
	const blocks = 32
	x := New(WithMaxBlocks(1 << 30))
	src := Source{Engine: "e", Model: "m"}
	hashes := make([]u64, blocks)
	b.ReportAllocs()
	for seq := 0; b.Loop(); seq++ {
		b.StopTimer()
		old := slices.Clone(hashes)
		for i := range hashes {
			hashes[i] = u64(rand.Uint64())
		}
		payload := message(removedEvent(old, "medium", "GPU"), storedEvent(hashes, nil, tokensOf(16*blocks, seq), 16,
			"medium",
			"GPU", "lora_name", nil, "extra_keys", make([]any, blocks), "group_idx", 0, "kv_cache_spec_kind",
			"full_attention"))
		b.StartTimer()
		if _, err := x.Apply(src, uint64(seq), payload, began); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(blocks*float64(b.N)/b.Elapsed().Seconds(), "blocks/s")
}
