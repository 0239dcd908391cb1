// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/zmq"
)

func TestASubscriberThatComesLateGetsThePastByReplay(t *testing.T) {
	for _, old := range []bool{false, true} {
		t.Run(fmt.Sprint("without topic frames: ", old), func(t *testing.T) {
			p := newPublisher(t, "a")
			p.old, p.topic = old, "kv@p@m"
			p.publish(5)
			b := newBook()
			s := begin(t, b, nil, p.endpoint(t, "p"))
			eventually(t, "the past", func() bool { return b.exact(first, 5) })
			p.publish(3)
			eventually(t, "what is live", func() bool { return b.exact(first, 8) })
			assert.Equal(t, []string{"a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7"}, b.get(first).batches)
			assert.Zero(t, s.Counts().Failed+s.Counts().Malformed)
		})
	}
}

func TestAnEngineThatHasSentNothingIsKnownExactly(t *testing.T) {
	p := newPublisher(t, "a")
	b := newBook()
	begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "exact", func() bool { return b.exact(first, 0) })
}

// A batch that is published at any moment of the beginning is either in the replay or comes live.
func TestNoBatchFallsBetweenSubscriptionAndReplay(t *testing.T) {
	for range 20 {
		p := newPublisher(t, "a")
		stop, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			for {
				select {
				case <-stop:
					return
				case <-time.After(200 * time.Microsecond):
					p.publish(1)
				}
			}
		}()
		b := newBook()
		s := beginAt(t, &patient, b, nil, p.endpoint(t, "p"))
		eventually(t, "a replay", func() bool { return s.Counts().Replays > 0 })
		close(stop)
		<-done
		n := len(p.kept)
		eventually(t, "all", func() bool { return b.exact(first, n) })
		assert.Equal(t, 1, b.get(first).replays, "no gap had to be mended")
	}
}

// An engine that is slow to take the subscription would send the batches after the replay to nobody.
func TestNoReplayBeginsBeforeTheEngineHasSeenTheSubscription(t *testing.T) {
	p := newPublisher(t, "a")
	p.publish(1)
	p.pub.Freeze(true)
	b := newBook()
	s := begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "connected", func() bool { return s.Counts().Streams == 1 })
	connected := time.Now()
	time.Sleep(quick.noPongs / 2)
	if time.Since(connected) < quick.noPongs*3/4 { // else the machine is busy
		p.set(func(p *publisher) { assert.Empty(t, p.requests) })
	}
	p.pub.Freeze(false)
	eventually(t, "exact", func() bool { return b.exact(first, 1) })
}

func TestAGapIsFilledByReplay(t *testing.T) {
	p := newPublisher(t, "a")
	b := newBook()
	begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "exact", func() bool { return b.exact(first, 0) })
	p.publish(6, 2, 3)
	eventually(t, "exact again", func() bool { return b.exact(first, 6) })
	assert.Equal(t, []string{"a0", "a1", "a2", "a3", "a4", "a5"}, b.get(first).batches)
}

// What is dropped at the end shows by no later number.
func TestDroppedLastBatchesAreFoundWhenTheStreamIsIdle(t *testing.T) {
	p := newPublisher(t, "a")
	b := newBook()
	begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "exact", func() bool { return b.exact(first, 0) })
	p.publish(4, 2, 3)
	eventually(t, "the last ones, too", func() bool { return b.exact(first, 4) })
	p.set(func(p *publisher) { p.requests = nil })
	time.Sleep(5 * quick.idle)
	p.set(func(p *publisher) { assert.LessOrEqual(t, len(p.requests), 1, "an idle engine is asked once") })
}

func TestWhatHasLeftTheBufferStaysMissing(t *testing.T) {
	p := newPublisher(t, "a")
	p.publish(9)
	p.oldest = 4
	b := newBook()
	begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "what is left", func() bool { return len(b.get(first).batches) == 5 })
	assert.False(t, b.exact(first, 5))
}

// vLLM's ROUTER drops messages for a slow reader before 0.33.0.
func TestAReplayWithHolesOrWithoutItsEndGoesOnWhereItBroke(t *testing.T) {
	p := newPublisher(t, "a")
	p.publish(10)
	p.most, p.noEnd = 3, 1
	b := newBook()
	s := begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "all", func() bool { return b.exact(first, 10) })
	assert.EqualValues(t, 1, s.Counts().Replays)
	assert.Zero(t, s.Counts().Failed)
	assert.Len(t, b.get(first).batches, 10)
}

func TestAReplayThatDoesNotGoOnIsGivenUpAndTriedAgainLater(t *testing.T) {
	p := newPublisher(t, "a")
	p.publish(2)
	p.stuck = true
	b := newBook()
	errs := make(chan error, 100)
	s := begin(t, b, &Options{Observe: func(_ Source, err error) { errs <- err }}, p.endpoint(t, "p"))
	began := time.Now()
	eventually(t, "it gives up", func() bool { return s.Counts().Failed == 1 })
	assert.GreaterOrEqual(t, time.Since(began), quick.replayIdle)
	assert.NoError(t, <-errs)
	var e *Error
	require.ErrorAs(t, <-errs, &e)
	assert.Equal(t, "kvevents: replay: the engine does not go on", e.Error())
	p.set(func(p *publisher) { p.stuck = false })
	eventually(t, "later", func() bool { return b.exact(first, 2) })
	p.set(func(p *publisher) { assert.LessOrEqual(t, len(p.requests), 3) })
}

func TestAnEngineWithoutReplayIsNeverExactUnlessItIsNew(t *testing.T) {
	p := newPublisher(t, "a")
	e := endpoint(t, "p", map[string]string{"kvEvents": "tcp://" + p.pub.Addr()})
	b := newBook()
	begin(t, b, nil, e)
	eventually(t, "the sink is told", func() bool { return b.get(first).replays > 0 })
	p.publish(1)
	eventually(t, "live", func() bool { return len(b.get(first).aside) == 1 })
	assert.False(t, b.exact(first, 1))
}

// The connection of one rank says nothing of the others.
func TestALostConnectionWithoutReplayForgetsItsRankAlone(t *testing.T) {
	p, other := newPublisher(t, "a"), newPublisher(t, "b")
	b := newBook()
	s := begin(t, b, nil, endpoint(t, "p", map[string]string{
		"kvEvents": "tcp://" + p.pub.Addr() + ",tcp://" + other.pub.Addr()}))
	second := Source{Engine: "p", Model: "m", Rank: 1}
	eventually(t, "the sink is told", func() bool { return b.get(first).replays > 0 && b.get(second).replays > 0 })
	p.publish(1)
	other.publish(1)
	eventually(t, "live", func() bool { return len(b.get(first).aside) == 1 && len(b.get(second).aside) == 1 })
	p.pub.Drop()
	eventually(t, "lost", func() bool { return s.Counts().Lost == 1 && b.get(first).lost })
	assert.Empty(t, b.get(first).aside)
	assert.Len(t, b.get(second).aside, 1)
}

func TestABrokenConnectionIsLostAtOnceAndGoesOn(t *testing.T) {
	p := newPublisher(t, "a")
	p.publish(3)
	b := newBook()
	s := begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "exact", func() bool { return b.exact(first, 3) })
	p.pub.Drop()
	eventually(t, "lost", func() bool { return s.Counts().Lost == 1 })
	p.publish(2)
	eventually(t, "exact again", func() bool { return b.exact(first, 5) })
	assert.Equal(t, []string{"a0", "a1", "a2", "a3", "a4"}, b.get(first).batches, "nothing was forgotten")
	p.set(func(p *publisher) {
		assert.EqualValues(t, 2, p.requests[len(p.requests)-1], "it asks from the last one on")
	})
}

func TestARestartedEngineBeginsAnew(t *testing.T) {
	p := newPublisher(t, "a")
	p.publish(3)
	b := newBook()
	s := begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "exact", func() bool { return b.exact(first, 3) })
	p.close()
	eventually(t, "lost", func() bool { return s.Counts().Lost == 1 && !b.exact(first, 3) })
	again := publisherAt(t, "b", p.pub.Addr(), p.router.Addr())
	again.publish(2)
	eventually(t, "the new life", func() bool { return b.exact(first, 2) })
	assert.Equal(t, []string{"b0", "b1"}, b.get(first).batches)
}

func TestASilentEngineIsLost(t *testing.T) {
	p := newPublisher(t, "a")
	b := newBook()
	s := begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "exact", func() bool { return b.exact(first, 0) })
	time.Sleep(2 * quick.silence)
	assert.Zero(t, s.Counts().Lost, "it answers heartbeats")
	p.pub.Freeze(true)
	defer p.pub.Freeze(false)
	eventually(t, "lost", func() bool { return s.Counts().Lost > 0 })
}

// Batches may be missing as soon as an engine gives no sign of life; the connection may still be good.
func TestASilentEngineIsDoubtedBeforeItIsLost(t *testing.T) {
	p := newPublisher(t, "a")
	b := newBook()
	s := beginAt(t, &patient, b, nil, p.endpoint(t, "p"))
	eventually(t, "exact", func() bool { return b.exact(first, 0) })
	p.pub.Freeze(true)
	eventually(t, "doubted", func() bool { return !b.exact(first, 0) })
	p.pub.Freeze(false)
	eventually(t, "exact again", func() bool { return b.exact(first, 0) })
	assert.Zero(t, s.Counts().Lost)
}

// A replay that checks whether the last batches have come is no reason to claim meanwhile that they have.
func TestAnEngineThatDoesNotReplayIsDoubted(t *testing.T) {
	p := newPublisher(t, "a")
	b := newBook()
	s := begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "exact", func() bool { return b.exact(first, 0) })
	p.router.Freeze(true)
	p.publish(1)
	eventually(t, "live", func() bool { return b.exact(first, 1) })
	eventually(t, "doubted", func() bool { return !b.exact(first, 1) })
	p.router.Freeze(false)
	eventually(t, "exact again", func() bool { return b.exact(first, 1) })
	assert.Zero(t, s.Counts().Lost)
}

func TestMessagesOfAnotherFormAreCountedAndNothingElse(t *testing.T) {
	p := newPublisher(t, "a")
	b := newBook()
	s := begin(t, b, nil, p.endpoint(t, "p"))
	eventually(t, "exact", func() bool { return b.exact(first, 0) })
	p.pub.Publish([]byte(""), be(0))
	p.pub.Publish([]byte(""), []byte("short"), []byte("x"))
	p.pub.Publish([]byte(""), be(0), []byte("bad"))
	p.publish(1)
	eventually(t, "counted", func() bool { return s.Counts().Malformed == 3 && b.exact(first, 1) })
}

// Eight replays run at a time, over all engines.
func TestReplaysAtATimeAreBounded(t *testing.T) {
	var mu sync.Mutex
	running, most := 0, 0
	p := newPublisher(t, "a")
	router, err := zmq.ListenROUTER("127.0.0.1:0", func(peer *zmq.Peer, _ [][]byte) {
		mu.Lock()
		running++
		most = max(most, running)
		mu.Unlock()
		time.Sleep(20 * time.Millisecond)
		mu.Lock()
		running--
		mu.Unlock()
		_ = peer.Send(nil, nil, []byte("\xff\xff\xff\xff\xff\xff\xff\xff"), nil)
	})
	require.NoError(t, err)
	defer router.Close()
	_, port, err := net.SplitHostPort(router.Addr())
	require.NoError(t, err)
	const ranks = 30
	events, replays := "", ""
	for range ranks {
		events += "tcp://" + p.pub.Addr() + ","
		replays += "tcp://*:" + port + ","
	}
	b := newBook()
	begin(t, b, nil, endpoint(t, "p", map[string]string{"kvEvents": events, "kvEventsReplay": replays}))
	for rank := range ranks {
		eventually(t, "exact", func() bool { return b.exact(Source{"p", "m", rank}, 0) })
	}
	mu.Lock()
	defer mu.Unlock()
	assert.LessOrEqual(t, most, replaysAtOnce)
	assert.Greater(t, most, 1)
}
