// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"bytes"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// stream is what is known of a source: where it stands in its stream of batches, and its columns.
type stream struct {
	index  *Index
	source Source
	model  *model
	exact  atomic.Bool // status.State == Exact, for Match

	mu     sync.Mutex
	gone   bool // the index has forgotten it
	status Status
	place
	content
}

// place is where a source stands in its stream.
type place struct {
	begun bool    // next says what comes
	whole bool    // nothing before next is missing
	next  uint64  // the batch that comes
	sum   uint64  // of the payload of the batch before it, by which a process is known again
	sent  float64 // when the engine sent that batch
	doubt bool    // the connection was lost: is it the same process?
	short bool    // batches before next are missing, and a replay from 0 might have them

	live      bool   // a live batch has come
	last      uint64 // the last of them
	aside     []pending
	asideSize int

	replay replay

	quickest float64 // the least delay of a batch, by both clocks
	heardAt  time.Time
	late     bool
}

// pending is a live batch that came before those that precede it.
type pending struct {
	seq     uint64
	payload []byte
}

// A replay from its first answer to its end.
type replay uint8

const (
	replayNone    replay = iota // no answer has come yet
	replayRuns                  // answers are taken
	replayIgnored               // the rest of the answers is of no use
	replayAgain                 // as before, and another replay is needed
)

const (
	asideMost  = 1024
	asideBytes = 4 << 20
)

// The reasons of a status.
const (
	reasonNone    = "no stream"
	reasonLost    = "the connection was lost"
	reasonGap     = "batches are missing"
	reasonBegin   = "the first batches are missing"
	reasonPayload = "a batch could not be read"
	reasonLate    = "batches come late"
	reasonBlock   = "how many tokens a block has is not known yet"
)

// Apply takes a live batch: the second and third frame of a message of an engine's PUB socket. Batches that came
// already, or in a replay, change nothing. One that comes too early is kept aside, until a replay has brought what is
// missing: then replay is true. A number that is too low is that of an engine which has started again; all that was
// known of it is dropped. The error says that the payload is no batch, and the state then that something is missing.
// The index does not keep payload.
func (x *Index) Apply(src Source, seq uint64, payload []byte, now time.Time) (replay bool, err error) {
	s := x.stream(src)
	defer s.mu.Unlock()
	defer s.settle(now)
	b, err := readBatch(payload)
	if s.restarted(seq, b.sent) {
		s.restart()
	}
	s.live, s.last = true, seq
	if !s.heardAt.IsZero() || !s.begun || seq >= s.next { // else it waited while a replay ran
		s.hear(b.sent, now)
	}
	s.status.Heard = now
	if !s.begun && seq == 0 {
		s.begin(0)
	}
	switch {
	case s.begun && !s.doubt && seq == s.next:
		err = s.take(payload, b, err)
		s.catchUp()
	case s.begun && !s.doubt && seq < s.next:
	default:
		s.setAside(seq, payload)
	}
	return s.behind(), err
}

// restarted tells by a live batch that the engine is another process: its number is not above the last one's, or the
// replay has brought a number as high already, but of an earlier time.
func (p *place) restarted(seq uint64, sent float64) bool {
	return p.live && seq <= p.last || p.begun && seq < p.next && sent > p.sent && sent > 0
}

// restart forgets all, since another process has nothing of it.
func (s *stream) restart() {
	s.reset()
	replay := s.replay
	if replay != replayNone {
		replay = replayAgain
	}
	s.place = place{quickest: s.quickest, heardAt: s.heardAt, replay: replay}
}

func (p *place) begin(seq uint64) {
	p.begun, p.next, p.whole, p.doubt, p.short = true, seq, seq == 0, false, false
}

// behind reports whether a replay is needed for what came live.
func (p *place) behind() bool { return p.doubt || !p.begun || p.live && p.last >= p.next }

// take applies the batch that comes next.
func (s *stream) take(payload []byte, b batch, err error) error {
	if err == nil {
		err = s.apply(&b)
	}
	if err != nil {
		s.spoil(reasonPayload)
	}
	s.next++
	s.sum, s.sent = s.index.hash.text(0, textPayload, payload), b.sent
	return err
}

func (p *place) setAside(seq uint64, payload []byte) {
	if len(p.aside) < asideMost && p.asideSize+len(payload) <= asideBytes {
		p.aside = append(p.aside, pending{seq, bytes.Clone(payload)})
		p.asideSize += len(payload)
	}
}

// catchUp applies the batches aside that come next, and drops those that came in a replay.
func (s *stream) catchUp() {
	n := 0
	for ; n < len(s.aside) && s.aside[n].seq <= s.next; n++ {
		if s.aside[n].seq == s.next {
			b, err := readBatch(s.aside[n].payload)
			_ = s.take(s.aside[n].payload, b, err) // its status says what is wrong
		}
		s.asideSize -= len(s.aside[n].payload)
	}
	s.aside = slices.Delete(s.aside, 0, n)
}

// hear notes when a batch came, and how late. The two clocks differ, so the quickest batch counts as no delay; as
// clocks drift, that grows by a thousandth. After a replay it counts anew.
func (s *stream) hear(sent float64, now time.Time) {
	if sent <= 0 {
		return
	}
	delay := float64(now.UnixNano())/1e9 - sent
	quickest := s.quickest + now.Sub(s.heardAt).Seconds()/1000
	if s.heardAt.IsZero() || delay < quickest {
		quickest = delay
	}
	s.quickest, s.heardAt = quickest, now
	s.status.Lag = time.Duration((delay - quickest) * 1e9)
	s.late = s.status.Lag > s.index.maxLag
}

// ReplayFrom returns the number of the first batch to ask an engine for, and whether a replay is needed now. That is
// the last batch that the index has, so that it sees by the answer whether the engine is still the same process; 0 for
// a new source. A replay that is not needed does no harm: it shows whether the last batches were lost.
func (x *Index) ReplayFrom(src Source) (from uint64, needed bool) {
	s := x.stream(src)
	defer s.mu.Unlock()
	switch {
	case !s.begun || s.short && !s.behind():
		return 0, true
	case s.next > 0:
		from = s.next - 1
	}
	return from, s.behind()
}

// Replayed takes an answer to a replay, in the order in which they come. The error is Apply's.
func (x *Index) Replayed(src Source, seq uint64, payload []byte, now time.Time) error {
	s := x.stream(src)
	defer s.mu.Unlock()
	defer s.settle(now)
	b, err := readBatch(payload)
	first := s.replay == replayNone
	switch {
	case first && s.begun && !s.short && seq+1 < s.next: // live batches have come since it was asked
		return nil
	case first:
		s.replay = replayRuns
	}
	switch {
	case s.replay != replayRuns:
		return nil
	case first && s.begun:
		s.recognize(seq, payload)
	case !s.begun:
		s.begin(seq)
	}
	if s.replay != replayRuns || seq < s.next {
		return nil
	}
	if seq > s.next { // the engine has dropped what was between
		s.next, s.whole = seq, false
	}
	return s.take(payload, b, err)
}

// recognize compares the first answer of a replay with what the index has.
func (s *stream) recognize(seq uint64, payload []byte) {
	same := seq+1 == s.next && s.index.hash.text(0, textPayload, payload) == s.sum
	switch {
	case seq == 0 && s.short: // a whole replay takes the place of what has gaps
		s.rebuild(0)
	case same:
		s.doubt = false
	case seq+1 == s.next: // another process has another batch of this number
		s.restart()
		s.replay = replayAgain
	case seq+1 > s.next:
		// The engine has dropped the batch by which it would be known. For the same process, what comes follows a gap;
		// for one that may be another, it is a new begin.
		if s.doubt {
			s.rebuild(seq)
		}
	default: // from 0 as asked, but what is missing is still missing
		s.short, s.replay = false, replayIgnored
	}
}

// rebuild begins anew with a replay. What came live is still to come after it.
func (s *stream) rebuild(seq uint64) {
	s.reset()
	s.begin(seq)
}

// ReplayEnd ends a replay. whole says that the engine's mark of the end has come. Without it, and without any answer
// where an engine cannot replay or was not reached, the index goes on with the live batches that it has set aside, and
// calls its view incomplete. again says that another replay is needed at once, from what ReplayFrom then says: the
// engine is another process, or more live batches have come than the index can keep aside.
func (x *Index) ReplayEnd(src Source, whole bool, now time.Time) (again bool) {
	s := x.stream(src)
	defer s.mu.Unlock()
	defer s.settle(now)
	replay := s.replay
	s.replay = replayNone
	if !whole {
		s.goOn()
		return false
	}
	switch {
	case replay == replayAgain:
		return true
	case replay == replayNone && s.begun && s.next > 0: // the engine does not have what it has sent: it is another one
		s.restart()
		return true
	case replay == replayNone:
		s.begin(0) // it has sent nothing yet
	}
	s.late = false
	if s.catchUp(); s.behind() {
		return true
	}
	s.heardAt = time.Time{} // all is there, so the next batch is not late: a clock may have been set
	return false
}

// goOn continues with live batches without those that are missing.
func (s *stream) goOn() {
	if len(s.aside) == 0 {
		return
	}
	for len(s.aside) > 0 {
		if first := s.aside[0].seq; !s.begun || first > s.next || s.doubt {
			s.begun, s.doubt, s.whole, s.short = true, false, false, true
			s.next = max(s.next, first)
		}
		s.catchUp()
	}
	if s.next <= s.last { // what did not fit aside is lost
		s.next, s.whole, s.short = s.last+1, false, true
	}
}

// Lost tells that a source's connection was lost or could not be made, or that messages were dropped. Its state is
// [Unknown] until a replay has shown that the engine is still the same process, and brought what was missed. What was
// known is kept until then.
func (x *Index) Lost(src Source, now time.Time) {
	s := x.stream(src)
	defer s.mu.Unlock()
	s.lose(now)
}

// Gone is Lost where no replay will come, as the engine offers none: what was known is dropped, of this source alone.
func (x *Index) Gone(src Source, now time.Time) {
	s := x.stream(src)
	defer s.mu.Unlock()
	s.restart()
	s.lose(now)
}

func (s *stream) lose(now time.Time) {
	s.doubt, s.live, s.replay = true, false, replayNone
	s.aside, s.asideSize = nil, 0
	s.settle(now)
}

// settle sets the status by what is known now.
func (s *stream) settle(now time.Time) {
	state, reason := Exact, ""
	switch {
	case s.gone || !s.begun && !s.doubt:
		state, reason = Unknown, reasonNone
	case s.doubt:
		state, reason = Unknown, reasonLost
	case s.behind():
		state, reason = Incomplete, reasonGap
	case !s.whole:
		state, reason = Incomplete, reasonBegin
	case s.unusable != "":
		state, reason = Incomplete, s.unusable
	case s.trtllm.guess:
		state, reason = Incomplete, reasonBlock
	case s.late:
		state, reason = Incomplete, reasonLate
	}
	if s.status.Since.IsZero() || state != s.status.State {
		s.status.Since = now
	}
	s.status.State, s.status.Reason = state, reason
	s.exact.Store(state == Exact)
}
