// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"errors"
	"fmt"
	"time"
)

// streamCheck compares a stream with what the engine wrote, in pieces of any size.
type streamCheck struct {
	client *Client
	start  time.Time
	serial uint64
	word   uint64

	events events
	next   int    // chunks seen whole
	want   []byte // what must still come of the current event
	ending bool   // want is what follows the last chunk
	last   []byte // memory for want at the end
	tail   []byte // what came in place of last; by meaning only
}

func (s *streamCheck) reset(c *Client, start time.Time, serial, word uint64) {
	s.client, s.start, s.serial, s.word = c, start, serial, word
	s.events.reset(serial, word)
	s.next, s.want, s.ending, s.tail = 0, nil, false, s.tail[:0]
}

// feed checks the next piece.
func (s *streamCheck) feed(piece []byte) error {
	slot := &s.client.board.slots[s.client.slot]
	for len(piece) > 0 {
		if len(s.want) == 0 {
			if s.ending {
				return errors.New("something comes after [DONE]")
			}
			if slot.chunks.Load() == int64(s.next) {
				s.ending = true
				s.last = appendEnd(s.last[:0], s.serial, s.word, s.next)
				s.want = s.last
			} else {
				s.want = s.events.at(s.next)
			}
		}
		if s.ending && s.client.board.byMeaning {
			s.tail = append(s.tail, piece...)
			if len(s.tail) > 2*len(s.last) {
				return errors.New("too much comes after the last chunk")
			}
			return nil
		}
		n := min(len(piece), len(s.want))
		if !bytes.Equal(piece[:n], s.want[:n]) {
			if s.ending {
				return fmt.Errorf("the end after %d chunks is not what the engine sent", s.next)
			}
			return fmt.Errorf("chunk %d is not what the engine sent", s.next)
		}
		piece, s.want = piece[n:], s.want[n:]
		if len(s.want) == 0 && !s.ending {
			s.seen(slot)
		}
	}
	return nil
}

// seen counts a chunk after its last byte has come.
func (s *streamCheck) seen(slot *slot) {
	c := s.client
	s.next++
	c.meter.Chunks.Add(1)
	switch {
	case c.plan.Interval > 0:
		c.sample(time.Duration(c.board.now() - slot.sentAt.Load()))
	case s.next == 1:
		c.sample(time.Since(s.start))
	}
}

// end checks, after the response has ended, that the whole stream has come.
func (s *streamCheck) end() error {
	switch {
	case s.ending && s.client.board.byMeaning:
		return sameEnd(s.tail, s.last)
	case s.ending && len(s.want) == 0:
		return nil
	case s.ending:
		return errors.New("the stream ended without [DONE]")
	}
	return fmt.Errorf("the stream ended after %d chunks, before its end", s.next)
}
