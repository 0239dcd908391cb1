// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim/zmq"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// book is a sink that only keeps books: a batch is its payload. It follows the rules of an index.
type book struct {
	mu      sync.Mutex
	streams map[Source]*entry
	forgot  []string
}

type entry struct {
	next     uint64
	batches  []string // in the order in which they count
	aside    map[uint64]string
	last     string
	needed   bool
	whole    bool // nothing is missing since batch 0
	lost     bool
	live     uint64 // after the last live one
	replays  int
	asked    uint64 // the first batch of the replay that runs
	answered bool
	again    bool // a replay has shown another process
}

func newBook() *book { return &book{streams: map[Source]*entry{}} }

func (b *book) of(src Source) *entry {
	e := b.streams[src]
	if e == nil {
		e = &entry{needed: true, aside: map[uint64]string{}}
		b.streams[src] = e
	}
	return e
}

func (e *entry) take(seq uint64, payload string) {
	e.next, e.last, e.lost = seq+1, payload, false
	e.batches = append(e.batches, payload)
}

func (b *book) Apply(src Source, seq uint64, payload []byte, _ time.Time) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if bytes.HasPrefix(payload, []byte("bad")) {
		return false, errors.New("no batch")
	}
	e := b.of(src)
	overlap := seq < e.next && seq >= e.live && !e.needed && !e.lost
	e.live = seq + 1
	if overlap {
		return false, nil // the replay has overtaken it
	}
	if e.needed || seq != e.next || e.lost {
		e.needed = true
		e.aside[seq] = string(payload)
		return true, nil
	}
	e.take(seq, string(payload))
	return false, nil
}

func (b *book) ReplayFrom(src Source) (uint64, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.of(src)
	e.asked, e.answered = max(e.next, 1)-1, false
	return e.asked, e.needed
}

func (b *book) Replayed(src Source, seq uint64, payload []byte, _ time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.of(src)
	first := !e.answered
	e.answered = true
	switch {
	case first && e.next > 0 && seq == e.next-1 && string(payload) == e.last:
		e.lost = false
	case first && e.next > 0: // another process, or a hole
		*e = entry{needed: true, aside: e.aside, replays: e.replays, answered: true, again: true}
	case e.again:
	default:
		if first {
			e.whole = seq == 0
		}
		e.take(seq, string(payload))
	}
	return nil
}

func (b *book) ReplayEnd(src Source, whole bool, _ time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.of(src)
	e.replays++
	again := e.again
	if e.again = false; !whole || again {
		e.whole = false
		return again
	}
	if !e.answered && e.asked == 0 && e.next == 0 {
		e.whole = true
	}
	if !e.answered && e.next > 0 { // it knows not even the last one
		*e = entry{needed: true, aside: map[uint64]string{}, replays: e.replays}
		return true
	}
	for {
		payload, ok := e.aside[e.next]
		if !ok {
			break
		}
		e.take(e.next, payload)
	}
	clear(e.aside)
	e.needed, e.lost = false, false
	return false
}

func (b *book) Lost(src Source, _ time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.of(src)
	e.lost, e.needed, e.live = true, true, 0
}

func (b *book) Gone(src Source, now time.Time) {
	b.mu.Lock()
	delete(b.streams, src)
	b.mu.Unlock()
	b.Lost(src, now)
}

func (b *book) Forget(engine string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forgot = append(b.forgot, engine)
	for src := range b.streams {
		if src.Engine == engine {
			delete(b.streams, src)
		}
	}
}

// exact reports whether a stream is complete and has n batches.
func (b *book) exact(src Source, n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.streams[src]
	return e != nil && e.whole && !e.needed && !e.lost && len(e.batches) == n
}

func (b *book) get(src Source) entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.streams[src]; e != nil {
		copied := *e
		copied.aside, copied.batches = maps.Clone(e.aside), slices.Clone(e.batches)
		return copied
	}
	return entry{}
}

// publisher is an engine's publisher, whose faults are scripted.
type publisher struct {
	pub, router *zmq.Listener
	topic       string
	life        string // of this process: it is part of each payload

	mu       sync.Mutex
	kept     []string
	oldest   int // what a replay still has
	old      bool
	noEnd    int // replays without their end mark
	most     int // batches that a replay sends before the ROUTER drops the rest; 0: all
	requests []uint64
	stuck    bool
}

func newPublisher(t *testing.T, life string) *publisher {
	t.Helper()
	return publisherAt(t, life, "127.0.0.1:0", "127.0.0.1:0")
}

func publisherAt(t *testing.T, life, events, replay string) *publisher {
	t.Helper()
	p := &publisher{life: life}
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		var err error
		p.pub, err = zmq.ListenPUB(events, 1000)
		assert.NoError(c, err)
	}, 10*time.Second, 10*time.Millisecond)
	var err error
	p.router, err = zmq.ListenROUTER(replay, p.replay)
	require.NoError(t, err)
	t.Cleanup(p.close)
	return p
}

func (p *publisher) close() {
	p.pub.Close()
	p.router.Close()
}

// publish makes n batches; those of lost reach no subscriber.
func (p *publisher) publish(n int, lost ...int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range n {
		i := len(p.kept)
		payload := fmt.Sprint(p.life, i)
		p.kept = append(p.kept, payload)
		dropped := false
		for _, l := range lost {
			dropped = dropped || l == i
		}
		if !dropped {
			p.pub.Publish([]byte(p.topic), be(i), []byte(payload))
		}
	}
}

func be(i int) []byte { return binary.BigEndian.AppendUint64(nil, uint64(i)) }

func (p *publisher) replay(peer *zmq.Peer, frames [][]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(frames) != 2 {
		return
	}
	from := int(binary.BigEndian.Uint64(frames[1]))
	p.requests = append(p.requests, uint64(from))
	if p.stuck {
		return
	}
	send := func(topic string, seq, payload []byte) {
		if p.old {
			_ = peer.Send(nil, seq, payload)
		} else {
			_ = peer.Send(nil, []byte(topic), seq, payload)
		}
	}
	for i := max(from, p.oldest); i < len(p.kept); i++ {
		if p.most > 0 && i-from >= p.most {
			break
		}
		send(p.topic, be(i), []byte(p.kept[i]))
	}
	if p.noEnd > 0 {
		p.noEnd--
		return
	}
	if p.most > 0 && len(p.kept)-from > p.most { // the last one has room again
		send(p.topic, be(len(p.kept)-1), []byte(p.kept[len(p.kept)-1]))
	}
	send("", bytes.Repeat([]byte{0xff}, 8), nil)
}

func (p *publisher) set(f func(p *publisher)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(p)
}

// quick are the limits of time of tests.
var quick = timing{
	dial: 5 * time.Second, settle: 5 * time.Millisecond, noPongs: 100 * time.Millisecond,
	heartbeat: 300 * time.Millisecond, silence: 900 * time.Millisecond,
	idle: 100 * time.Millisecond, prompt: 300 * time.Millisecond, replayIdle: 400 * time.Millisecond,
	replayWhole: 15 * time.Second, poll: 5 * time.Millisecond, drain: 5 * time.Second,
	firstPause: 300 * time.Millisecond, replayPause: 300 * time.Millisecond,
	firstBackoff: 10 * time.Millisecond, lastBackoff: 100 * time.Millisecond,
	ask: time.Second, askAgain: 200 * time.Millisecond,
	loadOld: time.Second, loadSilence: 2 * time.Second,
}

// begin runs a subscriber over endpoints until the test ends.
func begin(t *testing.T, sink Sink, o *Options, endpoints ...discovery.Endpoint) *Subscriber {
	t.Helper()
	return beginAt(t, &quick, sink, o, endpoints...)
}

// patient are limits that no busy machine passes by itself.
var patient = func() timing {
	t := quick
	t.heartbeat, t.silence, t.idle, t.prompt = time.Second, time.Minute, 5*time.Second, 5*time.Second
	t.loadOld, t.loadSilence = time.Minute, time.Minute
	return t
}()

func beginAt(t *testing.T, at *timing, sink Sink, o *Options, endpoints ...discovery.Endpoint) *Subscriber {
	t.Helper()
	set, err := static.NewSet(endpoints...)
	require.NoError(t, err)
	return beginWith(t, at, sink, o, set)
}

func beginWith(t *testing.T, at *timing, sink Sink, o *Options, set *discovery.Set) *Subscriber {
	t.Helper()
	s, err := New(sink, o)
	require.NoError(t, err)
	s.t = *at
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { assert.NoError(t, set.Run(ctx)) })
	running.Go(func() { assert.NoError(t, s.Run(ctx, set)) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return s
}

// endpoint is an engine with these attributes.
func endpoint(t *testing.T, id string, attributes map[string]string) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New("http://127.0.0.1:1", discovery.RolePrefill)
	require.NoError(t, err)
	e.ID, e.Model, e.Attributes = id, "m", attributes
	return e
}

func (p *publisher) endpoint(t *testing.T, id string) discovery.Endpoint {
	t.Helper()
	return endpoint(t, id, map[string]string{"kvEvents": "tcp://" + p.pub.Addr(),
		"kvEventsReplay": "tcp://" + p.router.Addr()})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, 20*time.Second, 2*time.Millisecond, what)
}

var first = Source{Engine: "p", Model: "m"}

type roundTripper func(r *http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
