// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is an engine that has sent some batches, each with a block of one prompt.
type script struct {
	t      *testing.T
	x      *Index
	sent   [][]byte
	now    time.Time
	prompt []uint32
}

func newScript(t *testing.T, x *Index, batches int, salt u64) *script {
	s := &script{t: t, x: x, now: began, prompt: tokensOf(16*batches, 1)}
	for i := range batches {
		var parent any
		if i > 0 {
			parent = salt + u64(i) - 1
		}
		s.sent = append(s.sent, messageAt(began.Add(time.Duration(i)*time.Millisecond),
			storedEvent([]u64{salt + u64(i)}, parent, s.prompt[16*i:16*(i+1)], 16)))
	}
	return s
}

func (s *script) live(seq int) (replay bool) {
	replay, err := s.x.Apply(engineA, uint64(seq), s.sent[seq], s.now)
	require.NoError(s.t, err)
	return replay
}

func (s *script) answer(from, to int) {
	for seq := from; seq < to; seq++ {
		require.NoError(s.t, s.x.Replayed(engineA, uint64(seq), s.sent[seq], s.now))
	}
}

func (s *script) want(state State, blocks int) {
	s.t.Helper()
	assert.Equal(s.t, state, s.x.State("a").State, s.x.State("a").Reason)
	assert.Equal(s.t, 16*blocks, held(s.x, "a", Query{Tokens: s.prompt}).Tokens)
}

func (s *script) from(from int, needed bool) {
	s.t.Helper()
	f, n := s.x.ReplayFrom(engineA)
	assert.Equal(s.t, from, int(f))
	assert.Equal(s.t, needed, n)
}

func TestAStrangerIsUnknown(t *testing.T) {
	x := New()
	assert.Equal(t, Status{Reason: reasonNone}, x.State("a"))
	x.Forget("a")
	assert.Empty(t, x.Match(&Query{}, nil))
}

func TestAnEngineThatHasSentNothingIsExact(t *testing.T) {
	s := newScript(t, New(), 1, 1)
	s.from(0, true)
	s.want(Unknown, 0)
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, 0)
	assert.False(t, s.live(0))
	s.want(Exact, 1)
}

func TestALateJoinIsMadeGoodByAReplay(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	assert.True(t, s.live(4))
	s.want(Unknown, 0)
	s.answer(0, 5)
	assert.False(t, s.live(5), "it comes next")
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, 6)
	s.from(5, false)
}

func TestALateJoinWithoutReplayIsIncomplete(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	assert.True(t, s.live(3))
	assert.False(t, s.x.ReplayEnd(engineA, false, s.now))
	assert.Equal(t, Incomplete, s.x.State("a").State)
	assert.False(t, s.live(4))
	s.from(0, true) // later
	s.answer(0, 6)
	assert.False(t, s.live(5))
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, 6)
}

func TestAReplayThatHasLostItsBeginIsIncomplete(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	assert.True(t, s.live(5))
	s.answer(2, 6)
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	assert.Equal(t, Incomplete, s.x.State("a").State)
	assert.Equal(t, unusableParent, func() string {
		s.x.find(engineA).whole = true
		s.x.find(engineA).settle(s.now)
		return s.x.State("a").Reason
	}())
	s.from(5, false)
}

func TestAGapIsFilledByAReplay(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	assert.False(t, s.live(0))
	assert.False(t, s.live(1))
	assert.True(t, s.live(3))
	s.want(Incomplete, 2)
	assert.True(t, s.live(4))
	s.from(1, true)
	s.answer(1, 4)
	s.want(Incomplete, 4)
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, 5)
	s.answer(4, 6) // one that was not needed finds a batch that was lost
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, 6)
}

func TestAGapThatCannotBeFilledIsIncompleteUntilAllIsCleared(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	s.live(0)
	assert.True(t, s.live(2))
	assert.False(t, s.x.ReplayEnd(engineA, false, s.now))
	s.want(Incomplete, 1)
	_, err := s.x.Apply(engineA, 3, message(clearedEvent), s.now)
	require.NoError(t, err)
	s.want(Exact, 0)
}

func TestARestartIsSeenByItsNumbers(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	for i := range 4 {
		s.live(i)
	}
	s.want(Exact, 4)
	again := newScript(t, s.x, 6, 100)
	assert.True(t, again.live(2), "its first two batches were missed")
	s.want(Unknown, 0)
	again.from(0, true)
	again.answer(0, 3)
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, 3)
}

// The numbers alone do not tell of a restart where the new process has sent as many batches.
func TestARestartIsSeenByTheBytesOfTheLastBatch(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	for i := range 3 {
		s.live(i)
	}
	s.x.Lost(engineA, s.now)
	s.want(Unknown, 3)
	again := newScript(t, s.x, 6, 100)
	assert.True(t, again.live(4))
	s.want(Unknown, 3)
	again.from(2, true)
	again.answer(2, 5)
	assert.True(t, s.x.ReplayEnd(engineA, true, s.now), "from its begin")
	s.want(Unknown, 0)
	again.from(0, true)
	again.answer(0, 5)
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, 5)
}

func TestARestartIsSeenWhereTheReplayIsEmpty(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	for i := range 3 {
		s.live(i)
	}
	s.x.Lost(engineA, s.now)
	assert.True(t, s.x.ReplayEnd(engineA, true, s.now), "it does not have batch 2")
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, 0)
}

// Live batches wait in the socket while a replay runs. One with a low number and a late time is of another process.
func TestARestartAfterAReplayIsSeenByItsTime(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	s.answer(0, 4)
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	assert.False(t, s.live(2))
	s.want(Exact, 4)
	replay, err := s.x.Apply(engineA, 3, messageAt(began.Add(time.Hour), clearedEvent), s.now)
	require.NoError(t, err)
	assert.True(t, replay)
	s.want(Unknown, 0)
}

func TestALostConnectionToTheSameProcessCostsNothing(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	for i := range 3 {
		s.live(i)
	}
	s.now = s.now.Add(time.Second)
	s.x.Lost(engineA, s.now)
	assert.Equal(t, Status{State: Unknown, Since: s.now, Heard: began, Reason: reasonLost, Lag: s.x.State("a").Lag},
		s.x.State("a"))
	s.answer(2, 5)
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, 5)
	assert.Equal(t, s.now, s.x.State("a").Since)
}

func TestALostConnectionWithoutReplayIsIncomplete(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	s.live(0)
	s.x.Lost(engineA, s.now)
	assert.False(t, s.x.ReplayEnd(engineA, false, s.now))
	s.want(Unknown, 1)
	assert.True(t, s.live(1))
	assert.False(t, s.x.ReplayEnd(engineA, false, s.now))
	s.want(Incomplete, 2)
}

func TestLiveBatchesAboveTheBoundAreReplayed(t *testing.T) {
	s := newScript(t, New(), asideMost+10, 1)
	for i := 1; i < len(s.sent); i++ {
		assert.True(t, s.live(i))
	}
	assert.Len(t, s.x.find(engineA).aside, asideMost)
	s.answer(0, 3)
	assert.True(t, s.x.ReplayEnd(engineA, true, s.now))
	s.from(asideMost, true)
	s.answer(asideMost, len(s.sent))
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.want(Exact, len(s.sent))

	s = newScript(t, New(), asideMost+10, 1)
	for i := 1; i < len(s.sent); i++ {
		s.live(i)
	}
	assert.False(t, s.x.ReplayEnd(engineA, false, s.now))
	s.from(0, true)
	assert.Equal(t, reasonBegin, s.x.State("a").Reason)
}

func TestBatchesThatComeLateMakeTheViewIncomplete(t *testing.T) {
	s := newScript(t, New(WithMaxLag(time.Second)), 6, 1)
	s.now = began.Add(time.Hour) // the clocks differ
	s.live(0)
	s.live(1)
	s.want(Exact, 2)
	s.now = s.now.Add(2 * time.Second)
	s.live(2)
	s.want(Incomplete, 3)
	assert.Equal(t, reasonLate, s.x.State("a").Reason)
	assert.InDelta(t, 2.0, s.x.State("a").Lag.Seconds(), 0.1)
	s.now = began.Add(time.Hour)
	s.live(3)
	s.want(Exact, 4)
}

// A clock that was set, here or at the engine, makes batches look late until a replay has shown that all are there.
func TestAClockThatIsSetMakesBatchesLateUntilTheNextReplay(t *testing.T) {
	s := newScript(t, New(), 6, 1)
	s.live(0)
	s.live(1)
	s.now = s.now.Add(time.Hour)
	s.live(2)
	s.want(Incomplete, 3)
	s.answer(2, 4)
	assert.False(t, s.x.ReplayEnd(engineA, true, s.now))
	s.live(3) // it waited while the replay ran
	s.want(Exact, 4)
	s.live(4)
	s.want(Exact, 5)
	s.now = s.now.Add(3 * time.Second)
	s.live(5)
	s.want(Incomplete, 6)
}

func TestTheStateIsThatOfTheWorstRank(t *testing.T) {
	x, p := New(), tokensOf(16, 1)
	feed(t, x, engineA, storedEvent([]u64{1}, nil, p, 16))
	rank := Source{Engine: "a", Model: "m", Rank: 1}
	_, _ = x.Apply(rank, 5, message(storedEvent([]u64{1}, nil, p, 16)), began)
	assert.Equal(t, Unknown, x.State("a").State)
	x.ReplayEnd(rank, false, began)
	assert.Equal(t, Incomplete, x.State("a").State)
	hits := x.Match(&Query{Model: "m", Tokens: append(p, 1)}, nil)
	assert.Equal(t, []Hit{{Engine: "a", Device: 16, Tokens: 16, Exact: true}, {Engine: "a", Rank: 1, Device: 16,
		Tokens: 16}}, hits)
}

func TestAnEngineWithAnotherModelIsAnotherOne(t *testing.T) {
	x, p := New(), tokensOf(16, 1)
	feed(t, x, engineA, storedEvent([]u64{1}, nil, p, 16))
	other := engineA
	other.Model = "n"
	_, _ = x.Apply(other, 0, message(storedEvent([]u64{1}, nil, p, 16)), began)
	q := Query{Model: "m", Tokens: append(p, 1)}
	assert.Empty(t, x.Match(&q, nil))
	q.Model = "n"
	assert.Len(t, x.Match(&q, nil), 1)
}

// Match waits for no Apply, and what it says is of some engine that is there.
func TestMatchRunsBesideApply(t *testing.T) {
	x, p := New(), tokensOf(16*64, 1)
	hashes := make([]u64, 64)
	for i := range hashes {
		hashes[i] = u64(i + 1)
	}
	var group sync.WaitGroup
	done := make(chan struct{})
	for e := range 4 {
		group.Go(func() {
			src := Source{Engine: string(rune('a' + e)), Model: "m"}
			for round, seq := 0, uint64(0); ; round, seq = round+1, seq+2 {
				select {
				case <-done:
					return
				default:
				}
				_, _ = x.Apply(src, seq, message(storedEvent(hashes, nil, p, 16)), began)
				_, _ = x.Apply(src, seq+1, message(removedEvent(hashes[round%64:])), began)
				if round%7 == 6 {
					x.Forget(src.Engine)
					seq = ^uint64(1)
				}
				_ = x.State(src.Engine)
			}
		})
	}
	for range 2 {
		group.Go(func() {
			q := &Query{Model: "m", Tokens: append(append([]uint32{}, p...), 1)}
			var hits []Hit
			for range 2000 {
				hits = x.Match(q, hits[:0])
				for _, hit := range hits {
					assert.LessOrEqual(t, hit.Tokens, 16*64)
				}
			}
		})
	}
	time.Sleep(200 * time.Millisecond)
	close(done)
	group.Wait()
}

func TestMatchAllocatesNothing(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	x, p := New(), tokensOf(16*64, 1)
	hashes := make([]u64, 64)
	for i := range hashes {
		hashes[i] = u64(i + 1)
	}
	feed(t, x, engineA, storedEvent(hashes, nil, p, 16))
	q, hits := &Query{Model: "m", LoRA: "", Tokens: append(p, 1)}, make([]Hit, 0, 4)
	assert.Zero(t, testing.AllocsPerRun(100, func() { hits = x.Match(q, hits[:0]) }))
	assert.Len(t, hits, 1)
	stored, removed := message(storedEvent(hashes, nil, p, 16)), message(removedEvent(hashes))
	seq := uint64(0)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		_, _ = x.Apply(engineA, seq+1, stored, began)
		_, _ = x.Apply(engineA, seq+2, removed, began)
		seq += 2
	}))
	assert.Equal(t, Exact, x.State("a").State)
}
