// SPDX-License-Identifier: Apache-2.0

package pdflow

import "bytes"

// marks finds, in the bytes of an answer, the marks by which an engine says that it gave up although the answer looks
// whole: vLLM's finish_reason "abort" when it is terminated (captures nixl/55b), SGLang's {"type":"abort"}, vllm-ascend's
// stop_reason "recomputed". A client's text cannot fake one, since quotes inside JSON strings are escaped.
//
// This is all that is read of a stream on its way: one search per read, without parsing.
type marks struct {
	tail [markReach]byte // the end of what was scanned before, for marks that two reads cut
	n    int
}

const markReach = 48

var markWords = [...]struct {
	word   []byte
	before [][]byte // what may stand before it, without white space, nearest first
}{
	{[]byte(`"abort"`), [][]byte{[]byte(`"finish_reason":`), []byte(`"finish_reason":{"type":`)}},
	{[]byte(`"recomputed"`), [][]byte{[]byte(`"stop_reason":`)}},
}

// scan returns the offset in b of the event that holds a mark, or -1. Bytes before that offset may go to the client.
func (m *marks) scan(b []byte) int {
	at := -1
	if m.n > 0 {
		var joined [3 * markReach]byte
		n := copy(joined[:], m.tail[:m.n])
		n += copy(joined[n:], b[:min(len(b), markReach)])
		if find(joined[:n]) >= 0 {
			at = 0
		}
	}
	if at < 0 {
		if at = find(b); at >= 0 {
			at = eventStart(b, at)
		}
	}
	m.keep(b)
	return at
}

// keep remembers the end of b, unless b ends with an event.
func (m *marks) keep(b []byte) {
	switch {
	case len(b) == 0:
	case b[len(b)-1] == '\n':
		m.n = 0
	case len(b) >= markReach:
		m.n = copy(m.tail[:], b[len(b)-markReach:])
	default:
		if over := m.n + len(b) - markReach; over > 0 {
			copy(m.tail[:], m.tail[over:m.n])
			m.n -= over
		}
		m.n += copy(m.tail[m.n:], b)
	}
}

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
	var packed [markReach]byte
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
