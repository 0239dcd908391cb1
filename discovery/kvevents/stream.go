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

	// of the connection at hand
	wanted    bool      // a replay is needed, as far as is known
	notBefore time.Time // no replay begins earlier
	applied   bool      // batches came since the last replay
}

func (s *Subscriber) limits() zmtp.Limits {
	return zmtp.Limits{Frames: 8, Bytes: maxMessage, Time: s.t.dial}
}

// connect reads the events at an address, and connects again when the connection breaks, until ctx ends.
func (st *stream) connect(ctx context.Context, address string) {
	t := &st.s.t
	pause := t.firstBackoff
	for ctx.Err() == nil {
		c, err := zmtp.Dial(ctx, address, "SUB", []string{"PUB", "XPUB"}, st.s.limits())
		op := "connect"
		if err == nil {
			began := time.Now()
			op, err = "read", st.live(ctx, c, nil)
			if time.Since(began) > t.lastBackoff {
				pause = t.firstBackoff
			}
		}
		if ctx.Err() != nil {
			return
		}
		st.s.observe(st.src, op, err)
		if wait(ctx, jitter(pause)) != nil {
			return
		}
		pause = min(2*pause, t.lastBackoff)
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
		st.s.sink.Lost(st.src, time.Now())
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
	st.wanted = true // also of a process that may be the same: batches may be missing
	heard, asked := time.Now(), false
	for {
		if st.replayIfWanted(ctx) {
			heard, asked = time.Now(), false // nobody has listened meanwhile
		}
		pongs := c.Pongs()
		come, err := c.Wait(time.Now().Add(st.tick()))
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
			heard, asked = time.Now(), false
			continue
		case c.Pongs() > pongs:
			heard, asked = now, false
		case c.Pongs() > 0 && now.Sub(heard) > st.s.t.silence:
			return errSilent
		case !asked && now.Sub(heard) > st.s.t.heartbeat || now.Sub(heard) > 2*st.s.t.heartbeat:
			if err := c.Ping(); err != nil {
				return err
			}
			asked = true
		}
		if st.applied && now.Sub(heard) > st.s.t.idle {
			st.wanted = true // the last batches may have been dropped, which no later one shows
		}
	}
}

// tick is how long the stream waits for a message before it looks at its other duties.
func (st *stream) tick() time.Duration {
	t := &st.s.t
	if st.wanted && time.Now().After(st.notBefore) { // it waits for its turn
		return t.settle
	}
	return min(t.heartbeat, t.idle) / 2
}

// active waits until the engine has seen the subscription: libzmq answers a PING after what came before it. A peer that
// answers none, and is no libzmq, is given a heartbeat's time.
func (st *stream) active(ctx context.Context, c *zmtp.Conn) error {
	if err := c.Ping(); err != nil {
		return err
	}
	for end := time.Now().Add(st.s.t.heartbeat); c.Pongs() == 0 && time.Now().Before(end); {
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
	st.applied = true
}

func isTimeout(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)
}
