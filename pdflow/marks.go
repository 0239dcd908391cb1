// SPDX-License-Identifier: Apache-2.0

package pdflow

import "bytes"

// marks finds, at the end of an answer, the marks by which an engine says that it gave up although the answer looks
// whole: vLLM's finish_reason "abort" when it is terminated (captures nixl/55b), SGLang's {"type":"abort"}, vllm-ascend's
// stop_reason "recomputed". A client's text cannot fake one, since quotes inside JSON strings are escaped; APIs whose
// answers repeat a client's JSON are not searched (connector.API.Guarded).
//
// Such a mark stands in one of the last events. So a stream is not searched on its way: its end is kept, and searched when
// [DONE] or the end comes. Then [DONE] is held back and the connection cut, and the client sees a stream that is not whole.
type marks struct {
	tail [markReach]byte // the end of what went by
	n    int
}

// markReach holds the last event with a finish reason, a usage event and [DONE].
const markReach = 4 << 10

var (
	doneMark  = []byte("data: [DONE]")
	markWords = [...]struct {
		word   []byte
		before [][]byte // what may stand before it, without white space
	}{
		{[]byte(`"abort"`), [][]byte{[]byte(`"finish_reason":`), []byte(`"finish_reason":{"type":`)}},
		{[]byte(`"recomputed"`), [][]byte{[]byte(`"stop_reason":`)}},
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
	}
	m.keep(piece)
	return -1
}

// done reports whether the end that went by holds [DONE].
func (m *marks) done() bool { return bytes.Contains(m.tail[:m.n], doneMark) }

// whole looks at the next piece of an answer that is not streamed.
func (m *marks) whole(piece []byte) int {
	at := find(piece)
	if at < 0 && m.n > 0 {
		const reach = 64
		joined := append(append(make([]byte, 0, 2*reach), m.tail[max(0, m.n-reach):m.n]...), piece[:min(len(piece), reach)]...)
		if find(joined) >= 0 {
			at = 0
		}
	}
	m.keep(piece)
	return at
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
	var joined [2 * markReach]byte
	n := copy(joined[:], m.tail[:m.n])
	n += copy(joined[n:], piece[max(0, len(piece)-markReach):])
	return find(joined[:n]) >= 0
}

// keep remembers the end of what went by.
func (m *marks) keep(b []byte) {
	if len(b) >= markReach {
		m.n = copy(m.tail[:], b[len(b)-markReach:])
		return
	}
	if over := m.n + len(b) - markReach; over > 0 {
		copy(m.tail[:], m.tail[over:m.n])
		m.n -= over
	}
	m.n += copy(m.tail[m.n:], b)
}

// find returns the offset of the first mark, or -1.
func find(b []byte) int {
	for i := range markWords {
		w := &markWords[i]
		for from := 0; ; {
			j := bytes.Index(b[from:], w.word)
			if j < 0 {
				break
			}
			if follows(b[:from+j], w.before) {
				return from + j
			}
			from += j + len(w.word)
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
