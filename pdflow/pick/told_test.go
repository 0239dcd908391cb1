// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// words are what engines say of their load.
type words struct {
	mu   sync.Mutex
	now  time.Time
	said map[string]inspect.Load
}

func (w *words) of(id string) inspect.Load {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.said[id]
}

// clock is a second after the last word.
func (w *words) clock() time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.now.IsZero() {
		w.now = time.Unix(1000, 0)
	}
	return w.now
}

// say lets an engine say how many requests it runs.
func (w *words) say(id string, running int) {
	w.clock()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.said == nil {
		w.said = map[string]inspect.Load{}
	}
	at := w.now.Add(time.Second / 2)
	w.said[id] = inspect.Load{At: at, Running: running - running/2, Waiting: running / 2}
	w.now = at.Add(time.Second / 2)
}

// picks returns how many of n picks each decode engine gets, and what ends them.
func picks(t testing.TB, p pdflow.Picker, n int) (shares map[string]int, done []func(*pdflow.Outcome)) {
	t.Helper()
	shares = map[string]int{}
	for range n {
		got, err := p.Pick(context.Background(), &pdflow.PickInput{})
		require.NoError(t, err)
		shares[got.Decode.ID]++
		done = append(done, got.Done)
	}
	return shares, done
}

// Ten requests of others run at d0, so most of the next twenty go to d1. When they have left, and the engine says so,
// d0 gets as much as d1.
func TestTheRequestsOfOthersCount(t *testing.T) {
	for _, policy := range []pick.Policy{pick.LeastLoad(), pick.TwoChoices()} {
		t.Run(policy.String(), func(t *testing.T) {
			var w words
			p := pick.New(newFleet(t, many(1, 2)...).Set, policy, pick.WithSeed(1), pick.WithLoad(w.of),
				pick.WithNow(w.clock))
			w.say("d1", 0)
			w.say("d0", 10)
			shares, done := picks(t, p, 20)
			assert.LessOrEqual(t, shares["d0"], 6)
			for _, end := range done {
				end(&pdflow.Outcome{})
			}
			w.say("d0", 0)
			w.say("d1", 0)
			shares, _ = picks(t, p, 20)
			assert.InDelta(t, 10, shares["d0"], 2)
		})
	}
}

// An engine that says how many requests it has speaks of the picker's own, too.
func TestOwnRequestsDoNotCountTwice(t *testing.T) {
	var w words
	p := pick.New(newFleet(t, many(1, 2)...).Set, pick.LeastLoad(), pick.WithSeed(1), pick.WithLoad(w.of),
		pick.WithNow(w.clock))
	_, _ = picks(t, p, 20)
	w.say("d0", 10)
	shares, _ := picks(t, p, 20)
	assert.InDelta(t, 10, shares["d0"], 1)
	w.say("d0", 20)
	w.say("d1", 28)
	shares, _ = picks(t, p, 20)
	assert.Greater(t, shares["d0"], 12)
}

// Of many engines few are heard with each pick, and the one that is to be chosen is always among them.
func TestTheEngineThatIsToBeChosenIsHeard(t *testing.T) {
	var w words
	p := pick.New(newFleet(t, many(1, 40)...).Set, pick.LeastLoad(), pick.WithSeed(1), pick.WithLoad(w.of),
		pick.WithNow(w.clock))
	_, done := picks(t, p, 40)
	for _, end := range done {
		end(&pdflow.Outcome{})
	}
	for i := range 39 {
		w.say(fmt.Sprintf("d%d", i), 0)
	}
	w.say("d0", 100) // the next one, by what the picker knew
	shares, _ := picks(t, p, 1)
	assert.Zero(t, shares["d0"], "%v", shares)
}

// An engine of which nobody says anything, or nothing any more, has as many of others' requests as those that speak.
func TestWithoutAWordAnEngineIsLikeTheOthers(t *testing.T) {
	var w words
	p := pick.New(newFleet(t, many(1, 2)...).Set, pick.LeastLoad(), pick.WithSeed(1), pick.WithLoad(w.of),
		pick.WithNow(w.clock))
	_, done := picks(t, p, 1)
	done[0](&pdflow.Outcome{})
	w.say("d0", 100)
	shares, done := picks(t, p, 6)
	assert.InDelta(t, 3, shares["d0"], 2)
	for _, end := range done {
		end(&pdflow.Outcome{})
	}
	w.mu.Lock()
	delete(w.said, "d0")
	w.mu.Unlock()
	shares, _ = picks(t, p, 6)
	assert.InDelta(t, 3, shares["d0"], 2)
}

// Behind one URL are ranks, of which the engine speaks together.
func TestRanksShareTheRequestsOfOthers(t *testing.T) {
	var w words
	eps := append(many(1, 1), ep("ranks", discovery.RoleDecode, "dpSize=2"))
	p := pick.New(newFleet(t, eps...).Set, pick.LeastLoad(), pick.WithSeed(1), pick.WithLoad(w.of),
		pick.WithNow(w.clock))
	_, done := picks(t, p, 1)
	done[0](&pdflow.Outcome{})
	w.say("d0", 0)
	w.say("ranks", 20)
	shares, _ := picks(t, p, 10)
	assert.GreaterOrEqual(t, shares["d0"], 6, "as one of three has")
}

func TestLoadsAreHeardWithoutAllocations(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector allocates")
	}
	var w words
	p := pick.New(newFleet(t, many(4, 4)...).Set, pick.LeastLoad(), pick.WithSeed(1), pick.WithLoad(w.of),
		pick.WithNow(w.clock))
	in, ended, n := &pdflow.PickInput{}, &pdflow.Outcome{}, 0
	w.say("d0", 1)
	assert.Zero(t, testing.AllocsPerRun(200, func() {
		w.now, n = w.now.Add(time.Second), n+1
		w.said["d0"] = inspect.Load{At: w.now, Running: n % 5}
		got, _ := p.Pick(context.Background(), in)
		got.Done(ended)
	}))
}

// Many picks, and engines that speak meanwhile, leave no load behind.
func TestLoadsOfOthersGoAway(t *testing.T) {
	var w words
	p := pick.New(newFleet(t, many(2, 4)...).Set, pick.LeastLoad(), pick.WithSeed(1), pick.WithLoad(w.of),
		pick.WithNow(w.clock))
	var running sync.WaitGroup
	for g := range 4 {
		running.Go(func() {
			for i := range 300 {
				w.say(fmt.Sprintf("d%d", (g+i)%4), i%7)
				_, done := picks(t, p, 1)
				done[0](&pdflow.Outcome{})
			}
		})
	}
	running.Wait()
	for i := range 4 {
		w.say(fmt.Sprintf("d%d", i), 0)
	}
	_, done := picks(t, p, 4) // hears all
	for _, end := range done {
		end(&pdflow.Outcome{})
	}
	shares, _ := picks(t, p, 40)
	for id, n := range shares {
		assert.InDelta(t, 10, n, 3, id)
	}
}
