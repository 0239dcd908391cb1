// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"time"

	"github.com/pdkit/pdkit/internal/zmtp"
)

// maxMessage bounds a batch, in bytes. A step of 32k tokens in blocks of 16 has about 300 kB.
const maxMessage = 16 << 20

const errSilent = plainError("the engine gives no sign of life")

// stream reads the events of one source. One goroutine does so at a time.
type stream struct {
	s        *Subscriber
	src      Source
	replayAt func() string // where to ask for replays; "" is nowhere

	replayed  time.Time     // when the last replay ended
	notBefore time.Time     // no replay begins earlier
	pause     time.Duration // after the last replay, which failed; 0 if it did not

	// of the connection at hand
	wanted  bool      // a replay is needed, as far as is known
	applied bool      // batches came since the last replay
	came    time.Time // the last batch, or the end of the last replay
	doubted bool      // the sink has been told that batches may be missing
}

func (s *Subscriber) limits() zmtp.Limits {
	return zmtp.Limits{Frames: 8, Bytes: maxMessage, Time: s.t.dial}
}

// connect reads the events at an address until ctx ends.
func (st *stream) connect(ctx context.Context, address string) {
	st.s.connect(ctx, address, st.s.limits(), func(c *zmtp.Conn) error { return st.live(ctx, c, nil) },
		func(op string, err error) { st.s.observe(st.src, op, err) })
}

// connect lets live read a publisher's connection to its end, and connects again when it breaks, until ctx ends.
func (s *Subscriber) connect(ctx context.Context, address string, limits zmtp.Limits, live func(*zmtp.Conn) error,
	failed func(op string, err error)) {
	pause := s.t.firstBackoff
	for ctx.Err() == nil {
		c, err := zmtp.Dial(ctx, address, "SUB", []string{"PUB", "XPUB"}, limits)
		op := "connect"
		if err == nil {
			began := time.Now()
			op, err = "read", live(c)
			if time.Since(began) > s.t.lastBackoff {
				pause = s.t.firstBackoff
			}
		}
		if ctx.Err() != nil {
			return
		}
		failed(op, err)
		if wait(ctx, jitter(pause)) != nil {
			return
		}
		pause = min(2*pause, s.t.lastBackoff)
	}
}

// live reads a connection to its end, which it returns the reason of. first is a message that was read before; nil is
// none.
func (st *stream) live(ctx context.Context, c *zmtp.Conn, first [][]byte) error {
	stop := context.AfterFunc(ctx, c.Close)
	defer stop()
	defer c.Close()
	st.s.n.streams.Add(1)
	defer func() {
		st.s.n.streams.Add(-1)
		st.s.n.lost.Add(1)
		if st.replayAt() == "" {
			st.s.sink.Gone(st.src, time.Now())
		} else {
			st.s.sink.Lost(st.src, time.Now())
		}
	}()
	st.s.observe(st.src, "", nil)
	if first != nil {
		st.apply(first)
	}
	if err := c.Subscribe(""); err != nil {
		return err
	}
	if err := st.active(ctx, c); err != nil {
		return err
	}
	st.wanted, st.doubted, st.came = true, false, time.Now() // it may be the same process, and batches may be missing
	heard := time.Now()
	var asked time.Time // when a PING was sent that has not been answered
	for {
		began := time.Now()
		if st.replayIfWanted(ctx) && time.Since(began) > st.s.t.heartbeat {
			heard, asked = time.Now(), time.Time{} // nobody has listened for long
		}
		pongs := c.Pongs()
		come, err := c.Wait(st.until(heard, asked))
		if err != nil {
			return err
		}
		now := time.Now()
		switch {
		case come:
			frames, err := c.Read()
			if err != nil {
				return err
			}
			st.apply(frames)
		case c.Pongs() > pongs:
		case c.Pongs() > 0 && now.Sub(heard) > st.s.t.silence:
			return errSilent
		case now.Before(heard.Add(st.s.t.heartbeat)) || now.Before(asked.Add(st.s.t.heartbeat)):
			st.checkTail(now)
			continue
		default:
			if c.Pongs() > 0 && !asked.IsZero() {
				st.doubt()
			}
			if err := c.Ping(); err != nil {
				return err
			}
			asked = now
			continue
		}
		heard, asked = now, time.Time{}
		st.wanted = st.wanted || st.doubted
		st.checkTail(now)
	}
}

// checkTail asks for a replay some time after the last batch: those after it may have been dropped, which no later one
// shows.
func (st *stream) checkTail(now time.Time) {
	if st.applied && now.Sub(st.came) >= st.s.t.idle {
		st.wanted = true
	}
}

// doubt tells the sink that batches may be missing: the engine gives no sign of life, or does not respond. The next
// sign of life asks for a replay. On a machine that is too busy to see signs of life in time, it does so now and then.
func (st *stream) doubt() {
	if st.doubted {
		return
	}
	st.doubted = true
	st.s.sink.Lost(st.src, time.Now())
	if again := st.replayed.Add(st.s.t.firstPause); st.notBefore.Before(again) {
		st.notBefore = again
	}
}

// until is how long the stream waits for a message before it looks at its other duties.
func (st *stream) until(heard, asked time.Time) time.Time {
	t := &st.s.t
	end := heard.Add(t.heartbeat)
	if !asked.IsZero() {
		end = asked.Add(t.heartbeat)
	}
	also := func(at time.Time) {
		if at.Before(end) {
			end = at
		}
	}
	switch {
	case st.wanted:
		also(st.notBefore)
	case st.applied:
		also(st.came.Add(t.idle))
	}
	if least := time.Now().Add(t.settle); end.Before(least) { // a replay waits for its turn
		return least
	}
	return end
}

// active waits until the engine has seen the subscription: libzmq answers a PING after what came before it. A peer that
// answers none, and is no libzmq, is given some time.
func (st *stream) active(ctx context.Context, c *zmtp.Conn) error {
	if err := c.Ping(); err != nil {
		return err
	}
	for end := time.Now().Add(st.s.t.noPongs); c.Pongs() == 0 && time.Now().Before(end); {
		come, err := c.Wait(end)
		if err != nil {
			return err
		}
		if come {
			frames, err := c.Read()
			if err != nil {
				return err
			}
			st.apply(frames)
		}
	}
	// The publisher's thread looks at new subscriptions not more often than about once a millisecond.
	return wait(ctx, st.s.t.settle)
}

// apply gives a live message to the sink.
func (st *stream) apply(frames [][]byte) {
	n := &st.s.n
	if len(frames) != 3 || len(frames[1]) != 8 {
		n.malformed.Add(1)
		return
	}
	n.batches.Add(1)
	n.bytes.Add(int64(len(frames[2])))
	replay, err := st.s.sink.Apply(st.src, binary.BigEndian.Uint64(frames[1]), frames[2], time.Now())
	if err != nil {
		n.malformed.Add(1)
	}
	st.wanted = st.wanted || replay
	st.applied, st.came = true, time.Now()
}

func isTimeout(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)
}
