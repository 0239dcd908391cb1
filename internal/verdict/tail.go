// SPDX-License-Identifier: Apache-2.0

package verdict

import "bytes"

// Tail keeps the end of a response that goes by, and finds in it that the engine gave up although the response looks
// whole: a finish reason of Endings that is a failure (docs/protocols/nixl.md, recording 55b), and the stop_reason that
// a connector declares (connector.Ending.FailureStop). A client's text cannot fake one, since quotes inside JSON
// strings are escaped. Responses that repeat a client's JSON are not searched, but read: see Outer and EndsFailed.
//
// Such a mark stands in one of the last events. So not each piece of a stream is searched on its way: its end is kept,
// and searched when [DONE] or the end comes. Then [DONE] is held back and the connection cut, and the client sees a
// stream that is not whole.
//
// Thousands of streams wait at a time, and each has a Tail. Where events are short it keeps a few of them, and searches
// the others when it forgets them, a few at a time: of several choices one can end some events before the rest.
type Tail struct {
	bytes []byte // the end of what went by; nil as long as nothing has
	reach int    // the most that must be kept; up to a third more is, so that it is moved seldom
	stop  string // the stop_reason of a response that the engine gave up; "" if it has none
	// ends are where in bytes pieces end that a stream's event ends, the oldest first; 0 where that is not in it.
	ends   [keptEvents + 1]int
	failed bool // events that are forgotten said that the engine gave up, or were errors
}

// NewTail returns the tail of a response. stream says whether it is a stream of events; stop is the stop_reason with
// which the engine ends a response that it gave up, or "".
func NewTail(stream bool, stop string) Tail {
	if stream {
		return Tail{reach: streamReach, stop: stop}
	}
	return Tail{reach: wholeReach, stop: stop}
}

const (
	// streamReach holds the last event with a finish reason, a usage event and [DONE].
	streamReach = 3 << 10
	keptEvents  = 3   // so many are kept of short events, for the same
	firstTail   = 768 // what a stream's tail begins with; it grows where keptEvents are longer
	markReach   = 256 // no mark is longer
	// wholeReach holds a mark, or a usage, that two reads cut.
	wholeReach = 512

	doneLength = len("data: [DONE]")
)

var (
	doneLine = []byte("data: [DONE]")
	nextDone = []byte("\ndata: [DONE]")
)

// Stream looks at a stream's next piece; end says that it is the last. It returns the offset up to which the piece may
// go to the client, -1 for all of it.
func (t *Tail) Stream(piece []byte, end bool) int {
	doneAt, done := t.doneAt(piece)
	if !end && !done {
		t.Keep(piece)
		return -1
	}
	// The kept end and the piece's beginning are searched together, so that a mark that two reads cut is seen too.
	t.search(append(t.bytes, piece[:min(len(piece), t.reach)]...))
	if len(piece) > t.reach {
		t.search(piece)
	}
	if !t.failed {
		t.Keep(piece)
		return -1
	}
	if at := t.GaveUp(piece); at >= 0 {
		return eventStart(piece, at)
	}
	if done {
		return doneAt
	}
	return len(piece)
}

// doneAt returns where in piece [DONE] begins, whole or cut by the piece's end: 0 if it began before, or does not stand
// there.
func (t *Tail) doneAt(piece []byte) (at int, ok bool) {
	if bytes.HasPrefix(piece, doneLine) && (len(t.bytes) == 0 || t.bytes[len(t.bytes)-1] == '\n') {
		return 0, true
	}
	if at := bytes.Index(piece, nextDone); at >= 0 { // bytes may follow it
		return at + 1, true
	}
	var buf [3 * doneLength]byte
	last := append(buf[:0], t.bytes[max(0, len(t.bytes)-doneLength):]...)
	last = append(last, piece[max(0, len(piece)-2*doneLength):]...)
	if bytes.IndexByte(last, '[') < 0 { // as at the end of most chunks
		return 0, false
	}
	if at = bytes.LastIndex(last, doneLine[:len("data: [")]); at < 0 {
		return 0, false
	}
	ok = bytes.HasPrefix(last[at:], doneLine) || bytes.HasPrefix(doneLine, last[at:])
	return max(0, len(piece)-(len(last)-at)), ok
}

// Done reports whether the response's end, of which piece is the last, holds [DONE].
func (t *Tail) Done(piece []byte) bool {
	return bytes.Contains(t.bytes, doneLine) || bytes.Contains(piece, doneLine)
}

// Whole is Stream for a response that is no stream: the offset of the first mark, or -1.
func (t *Tail) Whole(piece []byte, end bool) int {
	at := t.GaveUp(piece)
	if at < 0 && len(t.bytes) > 0 && t.GaveUp(append(t.bytes, piece[:min(len(piece), wholeReach)]...)) >= 0 {
		at = 0
	}
	if !end {
		t.Keep(piece)
	}
	return at
}

// End returns the end of the response, of which piece is the last.
func (t *Tail) End(piece []byte) []byte {
	if len(t.bytes) == 0 {
		return piece
	}
	return append(t.bytes, piece[max(0, len(piece)-usageReach):]...)
}

// Keep remembers the end of what went by.
func (t *Tail) Keep(b []byte) {
	if len(b) > t.reach { // what is left out must not join what is before it and behind it
		if t.reach == streamReach {
			var cut [2 * markReach]byte // a mark that two reads cut
			t.search(append(append(cut[:0], t.bytes[max(0, len(t.bytes)-markReach):]...), b[:markReach]...))
			t.search(t.bytes)
			t.search(b[:len(b)-t.reach+markReach])
		}
		t.bytes, t.ends = t.bytes[:0], [keptEvents + 1]int{}
		b = b[len(b)-t.reach:]
	}
	if len(t.bytes)+len(b) > cap(t.bytes) {
		t.makeRoom(len(b))
	}
	t.bytes = append(t.bytes, b...)
	if t.reach == streamReach && bytes.HasSuffix(b, eventEnd) {
		copy(t.ends[:], t.ends[1:])
		t.ends[keptEvents] = len(t.bytes)
	}
}

var eventEnd = []byte("\n\n")

// makeRoom makes room for n bytes, at most reach: it forgets all but the last events and, if that is not enough, gets
// more memory, or forgets all but what is to be kept.
func (t *Tail) makeRoom(n int) {
	t.search(t.bytes[:t.ends[0]])
	t.forget(t.ends[0])
	need, most := len(t.bytes)+n, t.reach+t.reach/3
	switch {
	case need <= cap(t.bytes):
		return
	case need > most:
		n := need - t.reach
		if t.reach == streamReach {
			t.search(t.bytes)
			n = min(n, max(0, len(t.bytes)-markReach)) // a mark that two reads cut
		}
		t.forget(n)
		need = most
	}
	if need > cap(t.bytes) {
		const step = 256
		room := min(max(firstTail, (need+step-1)/step*step), most)
		t.bytes = append(make([]byte, 0, room), t.bytes...)
	}
}

func (t *Tail) search(b []byte) { t.failed = t.failed || t.GaveUp(b) >= 0 }

// forget drops the first n bytes.
func (t *Tail) forget(n int) {
	if n == 0 {
		return
	}
	t.bytes = t.bytes[:copy(t.bytes, t.bytes[n:])]
	for i := range t.ends {
		t.ends[i] = max(0, t.ends[i]-n)
	}
}

// GaveUp returns the offset of the first mark, or -1.
func (t *Tail) GaveUp(b []byte) int { return failedReason(b, t.stop) }

func eventStart(b []byte, at int) int {
	if i := bytes.LastIndex(b[:at], []byte("\n\n")); i >= 0 {
		return i + 2
	}
	return 0
}
