// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"context"
	"encoding/binary"
	"math"
	"time"

	"github.com/pdkit/pdkit/internal/zmtp"
)

// endMark is the sequence number of the last message of a replay.
const endMark = math.MaxUint64

// maxReplays bounds replays that are wanted one right after the other.
const maxReplays = 8

const (
	errHole = plainError("batches are missing in the replay")
	errIdle = plainError("the engine does not go on")
)

// replayIfWanted runs a replay if one is wanted and may begin now. Live messages wait meanwhile: the engine's publisher
// sends none while it replays. ran says that time has passed.
func (st *stream) replayIfWanted(ctx context.Context) (ran bool) {
	if !st.wanted || time.Now().Before(st.notBefore) {
		return false
	}
	if st.replayAt() == "" {
		st.s.sink.ReplayEnd(st.src, false, time.Now())
		st.wanted, st.applied, st.notBefore = false, false, time.Now().Add(st.s.t.replayPause)
		return false
	}
	select {
	case st.s.slots <- struct{}{}:
		defer func() { <-st.s.slots }()
	default:
		return false // others are at it
	}
	var err error
	for range maxReplays {
		if err = st.replay(ctx); ctx.Err() != nil {
			return true
		}
		if again := st.s.sink.ReplayEnd(st.src, err == nil, time.Now()); err != nil || !again {
			break
		}
	}
	st.replayed = time.Now()
	st.came = st.replayed
	if err != nil {
		st.s.n.failed.Add(1)
		st.s.observe(st.src, "replay", err)
		st.pause = min(max(2*st.pause, st.s.t.firstPause), st.s.t.replayPause)
		st.notBefore = st.came.Add(st.pause)
	} else {
		st.s.n.replays.Add(1)
		st.applied, st.doubted, st.pause = false, false, 0
	}
	_, st.wanted = st.s.sink.ReplayFrom(st.src)
	return true
}

// replay asks for the batches from the one that the sink names to the last one. A ROUTER drops what a slow reader has
// no room for, in the middle and at the end (vLLM before 0.33.0: 1,000 messages), so a replay with a hole or without
// its end mark is asked for again, from where it broke.
func (st *stream) replay(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, st.s.t.replayWhole)
	defer cancel()
	from, needed := st.s.sink.ReplayFrom(st.src)
	r := round{st: st, next: from, check: !needed}
	for {
		before := r.next
		err := r.ask(ctx)
		if err == nil || ctx.Err() != nil || r.next == before {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return err
		}
	}
}

// round is one request of a replay.
type round struct {
	st    *stream
	next  uint64 // the batch to ask for
	check bool   // no batch is known to be missing, so that the sink's view counts until the engine does not respond
}

// ask asks once, and returns nil if the end mark came and no batch was missing before it, apart from those that have
// left the engine's buffer, before the first one.
func (r *round) ask(ctx context.Context) error {
	s := r.st.s
	c, err := r.dial(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, c.Close)
	defer stop()
	if err := c.Write(nil, binary.BigEndian.AppendUint64(nil, r.next)); err != nil {
		return err
	}
	for first := true; ; {
		come, err := r.wait(c)
		if err != nil {
			return err
		}
		if !come {
			return errIdle
		}
		frames, err := c.Read()
		if err != nil {
			return err
		}
		seq, payload, ok := answer(frames)
		switch {
		case !ok:
			s.n.malformed.Add(1)
			return errNonsense
		case seq == endMark:
			return nil
		case seq < r.next:
			return errNonsense
		case seq > r.next && !first:
			return errHole
		}
		first = false
		s.n.batches.Add(1)
		s.n.bytes.Add(int64(len(payload)))
		if s.sink.Replayed(r.st.src, seq, payload, time.Now()) != nil {
			s.n.malformed.Add(1)
		}
		r.next = seq + 1
	}
}

// dial connects to the ROUTER.
func (r *round) dial(ctx context.Context) (*zmtp.Conn, error) {
	s := r.st.s
	limits := s.limits()
	if r.check {
		limits.Time = s.t.prompt
	}
	c, err := zmtp.Dial(ctx, r.st.replayAt(), "DEALER", []string{"ROUTER"}, limits)
	if err != nil && r.check && ctx.Err() == nil {
		r.doubt()
		c, err = zmtp.Dial(ctx, r.st.replayAt(), "DEALER", []string{"ROUTER"}, s.limits())
	}
	return c, err
}

// wait waits for the next message, and reports whether one is there.
func (r *round) wait(c *zmtp.Conn) (bool, error) {
	began, t := time.Now(), &r.st.s.t
	if r.check {
		if come, err := c.Wait(began.Add(t.prompt)); come || err != nil {
			r.check = false // it responds
			return come, err
		}
		r.doubt()
	}
	return c.Wait(began.Add(t.replayIdle))
}

func (r *round) doubt() {
	r.check = false
	r.st.doubt()
}

// answer reads a message of a replay: empty, topic, sequence number, payload. vLLM before vllm-project/vllm#45177 sends
// no topic.
func answer(frames [][]byte) (seq uint64, payload []byte, ok bool) {
	if len(frames) == 0 || len(frames[0]) != 0 {
		return 0, nil, false
	}
	frames = frames[1:]
	if len(frames) == 3 {
		frames = frames[1:]
	}
	if len(frames) != 2 || len(frames[0]) != 8 {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(frames[0]), frames[1], true
}
