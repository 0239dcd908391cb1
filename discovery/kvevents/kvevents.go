// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// Source is one stream of events: that of one data-parallel rank of one engine.
type Source struct {
	Engine string // the endpoint's ID
	Model  string // Options.Model, or the endpoint's
	Rank   int
}

// Sink takes the events. Calls for one source come one at a time; those for several sources may come at once. Payloads
// are valid until the call returns. now is the time at which the batch was read.
type Sink interface {
	// Apply takes one live batch: msgpack, or of TensorRT-LLM the JSON of one event, whose event_id is seq. replay says
	// that batches are missing, so that a replay is needed. An error says that the payload is no batch.
	Apply(src Source, seq uint64, payload []byte, now time.Time) (replay bool, err error)
	// ReplayFrom says with which batch a replay has to begin, and whether one is needed.
	ReplayFrom(src Source) (from uint64, needed bool)
	// Replayed takes one batch of a replay.
	Replayed(src Source, seq uint64, payload []byte, now time.Time) error
	// ReplayEnd ends a replay. whole says that nothing that the engine still has is missing; it is false where the
	// engine has no replay, or it failed. again says that another replay is needed at once.
	ReplayEnd(src Source, whole bool, now time.Time) (again bool)
	// Lost says that the stream is broken: batches may be missing, and the engine may be another process.
	Lost(src Source, now time.Time)
	// Gone is Lost where nothing will show whether the engine is still the same process, since it offers no replay:
	// nothing is known of the source any more.
	Gone(src Source, now time.Time)
	// Forget says that nothing is known of an engine any more: it is in the list no more.
	Forget(engine string)
}

// Options are a subscriber's options. The zero value subscribes to the engines whose entries have the attribute
// kvEvents.
type Options struct {
	// Model is the sources' model; "" takes each endpoint's own.
	Model string
	// Client asks engines where they publish, if their entries do not say it; nil asks nobody. For engines that want a
	// key see transport.WithHeader.
	Client http.RoundTripper
	// Poll asks engines for their events that keep them until then (TensorRT-LLM); nil takes Client. It must not give
	// up before the context ends: a response that is not read is lost.
	Poll http.RoundTripper
	// Listen is the address, HOST:PORT, at which rank 0 of engines connects whose sockets do not bind; rank n connects
	// n ports above. "" listens nowhere. An engine is recognized by its topic, kv@ID@MODEL, where ID is its entry's ID,
	// host and port, or host; or else by the address that it connects from, if no other engine has it.
	Listen string
	// ListenRanks is how many ports are listened at. Default 1.
	ListenRanks int
	// Loads reads the load streams of SGLang's engines, too, for [Subscriber.Load].
	Loads bool
	// Observe is called when a stream has begun (err is nil), and when one is broken, cannot be reached, or fails to be
	// replayed; of a load stream, when it fails for the first time since it told anything. Several goroutines may call
	// it at once. The error is an *[Error].
	Observe func(src Source, err error)
}

// Error is why a stream or its replay failed. Its text has no address.
type Error struct {
	Op  string // find, connect, read, replay, listen, load
	Err error
}

// Error says what failed, and how.
func (e *Error) Error() string {
	text := "the engine cannot be reached, or broke off"
	var known plainError
	switch {
	case errors.As(e.Err, &known):
		text = string(known)
	case isTimeout(e.Err):
		text = "not in time"
	}
	return "kvevents: " + e.Op + ": " + text
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// plainError is an error whose text has no address.
type plainError string

func (e plainError) Error() string { return string(e) }

// Counts are what a subscriber has done since it was made.
type Counts struct {
	Streams   int64 // that are connected now
	Batches   int64 // that were read, live and from replays
	Bytes     int64 // of their payloads
	Malformed int64 // messages that were no batch, or no load
	Lost      int64 // connections that broke
	Replays   int64 // that came to their end
	Failed    int64 // replays that did not
	Unknown   int64 // connections at Listen of nobody in the list
}

// counters are Counts while they change.
type counters struct {
	streams, batches, bytes, malformed, lost, replays, failed, unknown atomic.Int64
}

// limits of time. Tests shorten them.
type timing struct {
	dial         time.Duration // a connection with its handshake, and one message
	settle       time.Duration // from the PONG after a subscription to the replay
	noPongs      time.Duration // for the first PONG, of a peer that may answer none
	heartbeat    time.Duration // a silent peer is asked for a sign of life, and doubted after as much time again
	silence      time.Duration // a peer that gave signs of life before is lost after so long without one
	idle         time.Duration // of a live stream, before the tail is checked, and of a poll, before it is doubted
	prompt       time.Duration // a step of a check of the tail, before the peer is doubted
	replayIdle   time.Duration // between two messages of a replay
	replayWhole  time.Duration // a replay in all
	poll         time.Duration // from one poll to the next
	drain        time.Duration // a poll in all
	firstPause   time.Duration // after a replay that failed; it doubles up to replayPause
	replayPause  time.Duration // also after a replay that the engine does not offer
	firstBackoff time.Duration // before connecting again; it doubles up to lastBackoff
	lastBackoff  time.Duration
	ask          time.Duration // one question to an engine
	askAgain     time.Duration // where does it publish, if it said so before
	loadOld      time.Duration // what a rank said of its load counts for so long
	loadSilence  time.Duration // then its load stream is connected anew
}

// A sink that claims to know all of an engine must not do so for a second while it does not: heartbeat twice, and idle
// with prompt, are below that.
var usual = timing{
	dial: 3 * time.Second, settle: 20 * time.Millisecond, noPongs: time.Second, heartbeat: 300 * time.Millisecond,
	silence: 4 * time.Second, idle: 500 * time.Millisecond, prompt: 300 * time.Millisecond,
	replayIdle: 2 * time.Second, replayWhole: 2 * time.Minute, poll: 100 * time.Millisecond, drain: 30 * time.Second,
	firstPause: time.Second, replayPause: 30 * time.Second,
	firstBackoff: 100 * time.Millisecond, lastBackoff: 2 * time.Second, ask: 5 * time.Second, askAgain: time.Minute,
	loadOld: 3 * time.Second, loadSilence: 10 * time.Second,
}

// replaysAtOnce bounds replays that run at a time: each holds up one engine's publisher, and takes a core here.
const replaysAtOnce = 8

// Subscriber follows a list of engines. All methods are safe for concurrent use.
type Subscriber struct {
	sink  Sink
	o     Options
	t     timing
	slots chan struct{} // one for each replay that runs
	n     counters
	loads loads

	listen *listening // nil without Options.Listen

	mu      sync.Mutex
	engines map[string]*engine
}

// New makes a subscriber. It opens nothing before Run. The error is one of Options.
func New(sink Sink, o *Options) (*Subscriber, error) {
	s := &Subscriber{sink: sink, t: usual, slots: make(chan struct{}, replaysAtOnce), engines: map[string]*engine{}}
	if o != nil {
		s.o = *o
	}
	if s.o.Listen != "" {
		var err error
		if s.listen, err = newListening(s); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Run follows set until ctx ends, and returns when all it has started has ended: nil, or why Options.Listen cannot be
// opened. It subscribes to the engines that are ready, and goes on with one that is not ready for a while. An engine
// that drains or leaves the list is forgotten. Only one Run may run at a time.
func (s *Subscriber) Run(ctx context.Context, set *discovery.Set) error {
	if s.listen != nil {
		if err := s.listen.open(ctx); err != nil {
			return err
		}
		defer s.listen.close()
	}
	var running sync.WaitGroup
	defer running.Wait()
	defer s.follow(ctx, nil, &running)
	for snap := range set.Changes(ctx) {
		s.follow(ctx, snap.Endpoints, &running)
	}
	return nil
}

// Counts returns what the subscriber has done.
func (s *Subscriber) Counts() Counts {
	n := &s.n
	return Counts{Streams: n.streams.Load(), Batches: n.batches.Load(), Bytes: n.bytes.Load(),
		Malformed: n.malformed.Load(), Lost: n.lost.Load(), Replays: n.replays.Load(), Failed: n.failed.Load(),
		Unknown: n.unknown.Load()}
}

func (s *Subscriber) observe(src Source, op string, err error) {
	if s.o.Observe == nil {
		return
	}
	if err == nil {
		s.o.Observe(src, nil)
		return
	}
	s.o.Observe(src, &Error{Op: op, Err: err})
}
