// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// naive is an engine as a model: what it holds, what it has sent, and what it can replay.
type naive struct {
	rand    *rand.Rand
	source  Source
	hash    u64
	copies  map[string]int // by the tokens of a block and all before it
	names   map[string]u64
	sent    [][]byte            // of this process
	after   []map[string]int    // copies, after each batch
	buffer  int                 // batches that can be replayed
	queue   []int               // live batches on their way
	clock   time.Time           // of the whole test
	parents map[string]string   // of each block that was ever stored
	prompts map[string][]uint32 // by block
}

const naiveBlock = 4

func (n *naive) start() {
	n.copies, n.names = map[string]int{}, map[string]u64{}
	n.parents, n.prompts = map[string]string{}, map[string][]uint32{}
	n.sent, n.after, n.queue = nil, nil, nil
}

// step makes a batch: some prompts are computed, some blocks evicted, and seldom all are dropped.
func (n *naive) step() {
	var events []any
	for range 1 + n.rand.IntN(3) {
		switch r := n.rand.IntN(20); {
		case r == 0:
			clear(n.copies)
			events = append(events, clearedEvent)
		case r < 9 && len(n.copies) > 0:
			if e := n.evict(); e != nil {
				events = append(events, e)
			}
		default:
			events = append(events, n.compute()...)
		}
	}
	n.clock = n.clock.Add(time.Millisecond)
	n.queue = append(n.queue, len(n.sent))
	n.sent = append(n.sent, messageAt(n.clock, events...))
	n.after = append(n.after, maps.Clone(n.copies))
}

// compute stores what a prompt needs and the engine does not hold; or all of it, as beside another request.
func (n *naive) compute() (events []any) {
	prompt := naivePrompt(n.rand)
	twice := n.rand.IntN(4) == 0
	hit := 0
	for !twice && n.copies[blockKey(prompt, hit)] > 0 {
		hit++
	}
	for at := hit; at < len(prompt)/naiveBlock; {
		count := 1 + n.rand.IntN(len(prompt)/naiveBlock-at)
		var parent any
		if at > 0 {
			key := blockKey(prompt, at-1)
			if n.copies[key] == 0 {
				return events // a request keeps its blocks; in this model they may be gone
			}
			parent = n.names[key]
		}
		var hashes []u64
		for i := at; i < at+count; i++ {
			key := blockKey(prompt, i)
			if n.names[key] == 0 {
				n.hash++
				n.names[key] = n.hash * 0x9e3779b97f4a7c15
			}
			n.copies[key]++
			hashes = append(hashes, n.names[key])
		}
		events = append(events, storedEvent(hashes, parent, prompt[at*naiveBlock:(at+count)*naiveBlock], naiveBlock,
			"medium", "GPU", "group_idx", 0, "kv_cache_spec_kind", "full_attention"))
		at += count
	}
	return events
}

// evict removes a copy of any block, even of one that others follow.
func (n *naive) evict() any {
	keys := slices.Sorted(maps.Keys(n.copies))
	key := keys[n.rand.IntN(len(keys))]
	if n.copies[key]--; n.copies[key] == 0 {
		delete(n.copies, key)
	}
	return removedEvent([]u64{n.names[key]}, "medium", "GPU", "group_idx", 0)
}

func blockKey(prompt []uint32, block int) string {
	if (block+1)*naiveBlock > len(prompt) {
		return "none"
	}
	return fmt.Sprint(prompt[:(block+1)*naiveBlock])
}

// naivePrompt is one of some hundred prompts that have beginnings in common.
func naivePrompt(r *rand.Rand) []uint32 {
	prompt := make([]uint32, naiveBlock*(1+r.IntN(6)))
	for i := range prompt {
		prompt[i] = uint32(r.IntN(2)) * uint32(i%naiveBlock/3)
	}
	return prompt
}

// feeder does what discovery/kvevents does, over a channel that loses messages.
type feeder struct {
	*naive
	x         *Index
	lossy     bool
	connected bool
}

func (f *feeder) deliver() {
	if len(f.queue) == 0 || !f.connected {
		return
	}
	seq := f.queue[0]
	f.queue = f.queue[1:]
	if f.lossy && f.rand.IntN(8) == 0 {
		return
	}
	if replay, _ := f.x.Apply(f.source, uint64(seq), f.sent[seq], f.clock); replay && f.rand.IntN(3) > 0 {
		f.replay()
	}
}

// replay runs replays as long as another is needed. Some break off, and live messages come between the answers.
func (f *feeder) replay() {
	for range 8 {
		from, _ := f.x.ReplayFrom(f.source)
		first := max(int(from), len(f.sent)-f.buffer)
		whole := f.rand.IntN(6) > 0
		last := len(f.sent)
		for seq := first; seq < last; seq++ {
			if !whole && f.rand.IntN(4) == 0 {
				break
			}
			_ = f.x.Replayed(f.source, uint64(seq), f.sent[seq], f.clock)
			if len(f.queue) > 0 && f.rand.IntN(3) == 0 {
				live := f.queue[0]
				f.queue = f.queue[1:]
				_, _ = f.x.Apply(f.source, uint64(live), f.sent[live], f.clock)
			}
		}
		if again := f.x.ReplayEnd(f.source, whole, f.clock); !again {
			return
		}
	}
}

func (f *feeder) disconnect() {
	f.x.Lost(f.source, f.clock)
	f.queue, f.connected = nil, false
}

func (f *feeder) connect() {
	f.connected, f.queue = true, nil
	if f.rand.IntN(3) > 0 {
		f.replay()
	}
}

// truth is how many tokens of a prompt the engine holds after a batch.
func (n *naive) truth(batch int, prompt []uint32) int {
	if batch < 0 {
		return 0
	}
	held := 0
	for (held+1)*naiveBlock < len(prompt) && n.after[batch][blockKey(prompt, held)] > 0 {
		held++
	}
	return held * naiveBlock
}

// While the state says exact, Match says what the engine holds: never more, never less. The index stands at some batch,
// and what is on its way or was the last to be lost it cannot know; at the end, when all has come, it must be exact if
// the engine can still replay what is missing.
func TestMatchIsTheTruthWhileTheStateSaysExact(t *testing.T) {
	seeds, exact, checks, restarts := 400, 0, 0, 0
	if testing.Short() || raceDetector {
		seeds = 60
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(uint64(seed), 1))
		x := New()
		var feeders []*feeder
		for i := range 3 {
			n := &naive{rand: r, source: Source{Engine: fmt.Sprint("e", i), Model: "m", Rank: i % 2}, clock: began,
				buffer: []int{1 << 30, 20, 3}[r.IntN(3)]}
			n.start()
			feeders = append(feeders, &feeder{naive: n, x: x, lossy: r.IntN(2) == 0})
		}
		check := func(f *feeder, settled bool) {
			status := x.State(f.source.Engine)
			checks++
			if settled && f.buffer == 1<<30 {
				require.Equal(t, Exact, status.State, "seed %d: %s, %+v, sent %d", seed, status.Reason,
					x.find(f.source).place, len(f.sent))
			}
			if status.State != Exact {
				return
			}
			exact++
			s := x.find(f.source)
			require.LessOrEqual(t, int(s.next), len(f.sent))
			if settled {
				require.Len(t, f.sent, int(s.next))
			}
			for range 10 {
				prompt := append(naivePrompt(r), 0)
				want, got := f.truth(int(s.next)-1, prompt), 0
				for _, hit := range x.Match(&Query{Model: "m", Tokens: prompt}, nil) {
					if hit.Engine == f.source.Engine {
						got = hit.Tokens
						require.True(t, hit.Exact)
					}
				}
				require.Equal(t, want, got, "seed %d, %s at batch %d of %d, prompt %v", seed, f.source.Engine, s.next,
					len(f.sent),
					prompt)
			}
		}
		for range 300 {
			f := feeders[r.IntN(len(feeders))]
			f.clock = f.clock.Add(time.Millisecond)
			switch e := r.IntN(100); {
			case e < 40:
				f.step()
			case e < 85:
				f.deliver()
			case e < 90 && !f.connected:
				f.connect()
			case e < 92 && f.connected:
				f.disconnect()
			case e < 94: // the process ends, and the connection with it
				restarts++
				f.disconnect()
				f.start()
			case e < 95:
				x.Forget(f.source.Engine)
				f.queue, f.connected = nil, false
			case e < 98 && f.connected:
				f.replay()
			}
			check(f, false)
		}
		for _, f := range feeders {
			f.connected = true
			for range 20 { // some replays break off
				f.replay()
			}
			check(f, true)
			x.Forget(f.source.Engine)
		}
		require.Empty(t, *x.models.Load())
	}
	t.Logf("%d of %d states were exact, %d restarts", exact, checks, restarts)
	require.Greater(t, exact, checks/6)
}

// A page must have no more blocks than columns hold, or memory would grow for ever.
func TestNothingIsLeftOfAnEngineThatHasGone(t *testing.T) {
	x := New()
	for round := range 5 {
		for i := range 70 { // more than a page has columns
			src := Source{Engine: fmt.Sprint("e", i), Model: "m"}
			feed(t, x, src, storedEvent([]u64{1, 2}, nil, tokensOf(32, i%10), 16))
		}
		hits := x.Match(&Query{Model: "m", Tokens: append(tokensOf(32, 3), 1)}, nil)
		require.Len(t, hits, 7, round)
		for i, hit := range hits {
			require.Equal(t, 32, hit.Tokens)
			require.True(t, i == 0 || strings.Compare(hits[i-1].Engine, hit.Engine) < 0)
		}
		model := (*x.models.Load())["m"]
		require.Len(t, model.pages, 2)
		for i := range 70 {
			x.Forget(fmt.Sprint("e", i))
		}
		require.Empty(t, model.pages)
		require.Empty(t, *x.models.Load())
		require.Empty(t, x.streams)
	}
}
