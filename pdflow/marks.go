// SPDX-License-Identifier: Apache-2.0

package pdflow

import "bytes"

// marks finds, at the end of an answer, the marks by which an engine says that it gave up although the answer looks
// whole: vLLM's finish_reason "abort" when it is terminated (docs/protocols/nixl.md, recording 55b), SGLang's
// {"type":"abort"}, vllm-ascend's stop_reason "recomputed", and an error event after the first token, which goes to the
// client. A client's text cannot fake one, since quotes inside JSON strings are escaped; APIs whose answers repeat a
// client's JSON are not searched (connector.API.Guarded).
//
// Such a mark stands in one of the last events. So a stream is not searched on its way: its end is kept, and searched when
// [DONE] or the end comes. Then [DONE] is held back and the connection cut, and the client sees a stream that is not whole.
type marks struct {
	tail  []byte // the end of what went by; nil as long as nothing has
	reach int    // at least how much of it is kept, and at most twice that: so it is moved seldom
}

const (
	// streamReach holds the last event with a finish reason, a usage event and [DONE].
	streamReach = 3 << 10
	// wholeReach holds a mark, or a usage, that two reads cut.
	wholeReach = 512
)

var (
	doneMark  = []byte("data: [DONE]")
	markWords = [...]struct {
		word   []byte
		from   int      // where in it the search looks: not at the quote, which is everywhere
		before [][]byte // what may stand before it, without white space
	}{
		{[]byte(`"abort"`), 2, [][]byte{[]byte(`"finish_reason":`), []byte(`"finish_reason":{"type":`)}},
		{[]byte(`"recomputed"`), 5, [][]byte{[]byte(`"stop_reason":`)}},
	}
)

// stream looks at a stream's next piece. It returns the offset up to which the piece may go to the client, -1 for all of it.
func (m *marks) stream(piece []byte, end bool) int {
	if end || bytes.Contains(piece[max(0, len(piece)-2*len(doneMark)):], doneMark) || endsWithin(piece, doneMark) {
		if m.found(piece) {
			if at := find(piece); at >= 0 {
				return eventStart(piece, at)
			}
			return max(0, bytes.LastIndex(piece, []byte("data: [")))
		}
		if errorAt(append(m.tail, piece[max(0, len(piece)-m.reach):]...)) >= 0 {
			if at := bytes.LastIndex(piece, []byte("data: [")); at >= 0 {
				return at
			}
			return len(piece)
		}
	}
	m.keep(piece)
	return -1
}

// errorMark begins an event that is an error. No text of an answer looks like it, since line ends are escaped within JSON.
var errorMark = []byte("\ndata: {\"error\":")

// errorAt returns where the first error event begins, or -1.
func errorAt(b []byte) int {
	if bytes.HasPrefix(b, errorMark[1:]) {
		return 0
	}
	if at := bytes.Index(b, errorMark); at >= 0 {
		return at + 1
	}
	return -1
}

// done reports whether the end that went by holds [DONE].
func (m *marks) done() bool { return bytes.Contains(m.tail, doneMark) }

// whole looks at the next piece of a response that is not streamed.
func (m *marks) whole(piece []byte, end bool) int {
	at := find(piece)
	if at < 0 && len(m.tail) > 0 && find(append(m.tail, piece[:min(len(piece), wholeReach)]...)) >= 0 {
		at = 0
	}
	if !end {
		m.keep(piece)
	}
	return at
}

// end returns the end of the response, of which piece is the last.
func (m *marks) end(piece []byte) []byte {
	if len(m.tail) == 0 {
		return piece
	}
	return append(m.tail, piece[max(0, len(piece)-usageReach):]...)
}

// endsWithin reports whether b ends in the midst of word.
func endsWithin(b, word []byte) bool {
	for n := min(len(b), len(word)-1); n >= len("data: ["); n-- {
		if bytes.HasSuffix(b, word[:n]) {
			return true
		}
	}
	return false
}

// found searches the kept end and the last of the piece together, so that a mark that two reads cut is seen too.
func (m *marks) found(piece []byte) bool {
	return find(append(m.tail, piece[max(0, len(piece)-m.reach):]...)) >= 0
}

// keep remembers the end of what went by.
func (m *marks) keep(b []byte) {
	if m.tail == nil {
		m.tail = make([]byte, 0, 2*m.reach)
	}
	if len(b) >= m.reach {
		m.tail = append(m.tail[:0], b[len(b)-m.reach:]...)
		return
	}
	if len(m.tail)+len(b) > cap(m.tail) {
		m.tail = m.tail[:copy(m.tail, m.tail[len(m.tail)-m.reach:])]
	}
	m.tail = append(m.tail, b...)
}

// find returns the offset of the first mark, or -1.
func find(b []byte) int {
	for i := range markWords {
		w := &markWords[i]
		for at := 0; ; {
			j := bytes.Index(b[at:], w.word[w.from:])
			if j < 0 {
				break
			}
			start := at + j - w.from
			if start >= 0 && bytes.HasPrefix(b[start:], w.word) && follows(b[:start], w.before) {
				return start
			}
			at += j + 1
		}
	}
	return -1
}

// follows reports whether b, white space left out, ends with one of the suffixes.
func follows(b []byte, suffixes [][]byte) bool {
	var packed [48]byte
	n := len(packed)
	for i := len(b) - 1; i >= 0 && n > 0; i-- {
		if c := b[i]; c != ' ' && c != '\t' {
			n--
			packed[n] = c
		}
	}
	for _, s := range suffixes {
		if bytes.HasSuffix(packed[n:], s) {
			return true
		}
	}
	return false
}

func eventStart(b []byte, at int) int {
	if i := bytes.LastIndex(b[:at], []byte("\n\n")); i >= 0 {
		return i + 2
	}
	return 0
}
