// SPDX-License-Identifier: Apache-2.0

package sse

import (
	"bytes"
	"io"
	"strings"
)

// Member is where a response has a member that is withheld.
type Member struct {
	Depth  int // how many objects and arrays are around it: 1 is a member of the outermost object
	name   string
	needle []byte // the name as it ends a JSON string
	rare   int    // the index in needle of the byte that responses have least of
}

// rareLetters are those that responses have few of, the rarest first.
const rareLetters = "zqxjvkwbygpf"

// MemberAt is the member at a path with dots between nested names; an array's index counts as a name. The last name has
// no characters that JSON escapes.
func MemberAt(path string) *Member {
	name := path[strings.LastIndexByte(path, '.')+1:]
	m := &Member{Depth: 1 + strings.Count(path, "."), name: name, needle: []byte(name + `"`)}
	for i := range rareLetters {
		if m.rare = strings.IndexByte(name, rareLetters[i]); m.rare >= 0 {
			return m
		}
	}
	m.rare = 0
	return m
}

// index returns where in p the needle begins, -1 if it is not there. It is faster than [bytes.Index], which looks
// closer at each byte that is the needle's first.
func (m *Member) index(p []byte) int {
	for at := m.rare; at < len(p); at++ {
		j := bytes.IndexByte(p[at:], m.needle[m.rare])
		if j < 0 {
			break
		}
		if at += j; bytes.HasPrefix(p[at-m.rare:], m.needle) {
			return at - m.rare
		}
	}
	return -1
}

// Forbid passes a response on until it may hold a member that is not null. Then Read returns an error.
type Forbid struct {
	src    io.Reader
	member *Member
	err    error
	end    [32]byte // of what went by: the member may begin there
	ends   int
}

// Forbid makes f a reader of src that returns err in place of a piece with the member. The member's name is short.
func (f *Forbid) Forbid(src io.Reader, m *Member, err error) {
	*f = Forbid{src: src, member: m, err: err}
}

// Read implements io.Reader.
func (f *Forbid) Read(p []byte) (int, error) {
	n, err := f.src.Read(p)
	if n == 0 {
		return n, err
	}
	var buf [2 * len(f.end)]byte
	border := append(append(buf[:0], f.end[:f.ends]...), p[:min(n, len(f.end))]...)
	if f.ends > 0 && f.member.In(border) || f.member.In(p[:n]) {
		return 0, f.err
	}
	if n >= len(f.end) {
		border = p[n-len(f.end) : n]
	}
	f.ends = copy(f.end[:], border[max(0, len(border)-len(f.end)):])
	return n, err
}

// In reports whether b has the member, at any depth, with the beginning of a value that is not null.
func (m *Member) In(b []byte) bool {
	for {
		j := m.index(b)
		if j < 0 {
			return false
		}
		b = b[j+len(m.needle):]
		value, ok := bytes.CutPrefix(bytes.TrimLeft(b, " \t\r\n"), []byte(":"))
		if value = bytes.TrimLeft(value, " \t\r\n"); ok && len(value) > 0 && value[0] != 'n' {
			return true
		}
	}
}

// Withheld passes a response on, and empties one member on the way: an object, a list or a text loses what is in it,
// and null and numbers stay. The same name elsewhere, as in a text that speaks of the member, passes untouched.
//
// Nothing is held back, so that the member may be of any size and be cut anywhere by the reads. The events of a stream
// are searched for the name, and only an event that has the member is read byte by byte. The beginning of an event that
// is not whole yet is copied, and read only if the rest of the event has the member.
type Withheld struct {
	src    io.Reader
	member *Member
	depth  int // where the member is
	events bool
	blank  bool  // spaces stand where bytes were, so that the response keeps its length
	length int64 // the response's, until the first read; -1: not known

	begun []byte // has been passed on unread: the beginning of the event at hand, without the member

	// where in its event, or in the whole response, the reading stands
	line    line
	level   int  // objects and arrays that are open
	text    bool // in a string
	escaped bool // after its backslash
	matched int  // bytes of the string that are the name's; -1: it is another string
	key     bool // the name was read, and may be a key
	value   bool // its colon was read
	inside  int  // the level of the object or list that is being emptied; 0: none is
	emptied bool // the string at hand is being emptied
}

// line is where in a line of a stream the reading stands.
type line int

const (
	eventStart line = iota // before an event's first line
	lineStart              // before another line of it
	fieldName
	dataLine
	otherLine // a comment or another field
)

// Withhold makes w a reader of src that empties a member. depth is how many objects and arrays are around the member.
// events is false for a response that is no stream; length is the response's announced length in bytes, -1 if it was
// not announced.
func (w *Withheld) Withhold(src io.Reader, m *Member, depth int, events bool, length int64) {
	*w = Withheld{src: src, member: m, depth: depth, events: events, blank: length >= 0, length: length}
	if !events {
		w.line = dataLine
	}
}

// Read implements io.Reader.
func (w *Withheld) Read(p []byte) (int, error) {
	for {
		read, err := w.src.Read(p)
		whole := int64(read) == w.length && !w.events
		w.length = -1
		if whole && w.find(p[:read]) == read {
			return read, err
		}
		n := w.edit(p[:read])
		if n > 0 || err != nil || read == 0 {
			return n, err
		}
	}
}

// edit empties the member in the next piece, and returns the piece's new length.
func (w *Withheld) edit(p []byte) int {
	out := 0
	for i := 0; i < len(p); {
		if n := w.skip(p[i:]); n > 0 {
			out += move(p[out:], p[i:i+n])
			i += n
			continue
		}
		switch {
		case w.next(p[i]):
			p[out] = p[i]
			out++
		case w.blank:
			p[out] = ' '
			out++
		}
		i++
	}
	return out
}

// move is copy, which would also copy a piece onto itself.
func move(dst, src []byte) int {
	if len(src) == 0 || &dst[0] == &src[0] {
		return len(src)
	}
	return copy(dst, src)
}

var null = []byte("null")

// textWindow is how far ahead skip looks for a text's end, in bytes: further, and each escape in a text would be paid
// for with a search through the rest of it.
const textWindow = 128

// skip returns how much of p needs no reading: whole events without the member, and what cannot end a text.
func (w *Withheld) skip(p []byte) int {
	if w.line == eventStart {
		return w.skipEvents(p)
	}
	if !w.text || w.matched >= 0 || w.escaped || w.emptied || w.inside != 0 || w.line != dataLine {
		return 0
	}
	p = p[:min(textWindow, len(p))]
	for _, c := range [...]byte{'"', '\\', '\n'} {
		if n := bytes.IndexByte(p, c); n >= 0 {
			p = p[:n]
		}
	}
	return len(p)
}

// maxBegun is how much of an event is kept, in bytes: more than most events have.
const maxBegun = 1 << 10

// skipEvents returns how much of p, which goes on where begun ends, needs no reading: whole events without the member,
// or the beginning of an event if the member cannot begin there.
func (w *Withheld) skipEvents(p []byte) int {
	if len(w.begun) == 0 || !w.straddles(p) {
		end := w.find(p)
		if n := wholeEvents(p[:end]); n > 0 {
			w.begun = w.begun[:0]
			return n
		}
		if end == len(p) && len(w.begun)+len(p) <= maxBegun {
			w.begun = append(w.begun, p...)
			return len(p)
		}
	}
	begun := w.begun
	w.begun = nil
	for _, c := range begun {
		w.next(c)
	}
	return 0
}

// straddles reports whether the member's name may begin in begun and end, or be followed by its value, in p.
func (w *Withheld) straddles(p []byte) bool {
	var buf [128]byte
	n := len(w.member.needle)
	border := append(buf[:0], w.begun[max(0, len(w.begun)-n):]...)
	border = append(border, p[:min(len(p), n)]...)
	return w.find(border) < len(border)
}

// wholeEvents returns how much of p, which begins with an event, is whole events.
func wholeEvents(p []byte) int {
	for b := p; ; {
		j := bytes.LastIndexByte(b, '\n')
		if j < 0 {
			return 0
		}
		if b = b[:j]; bytes.HasSuffix(b, []byte("\n")) || bytes.HasSuffix(b, []byte("\n\r")) {
			return j + 1
		}
	}
}

// find returns where in p the member may be, and may be more than null; len(p) if it is not there. It may miss one at
// the end of p, in an event that is not whole.
func (w *Withheld) find(p []byte) int {
	for at := 0; ; {
		j := w.member.index(p[at:])
		if j < 0 {
			return len(p)
		}
		at += j + len(w.member.needle)
		after := bytes.TrimLeft(p[at:], " \t\r\n")
		if len(after) > 0 && len(after) == len(p)-at && after[0] != ':' {
			continue // a text that ends with the name
		}
		if len(after) > 0 && bytes.HasPrefix(bytes.TrimLeft(after[1:], " "), null) {
			continue // as in every chunk of vLLM 0.33.0
		}
		return at
	}
}

// next reads one byte, and reports whether it stays.
func (w *Withheld) next(c byte) bool {
	if w.events && !w.inLine(c) {
		return w.inside == 0
	}
	switch {
	case w.text:
		return w.inText(c)
	case c == ' ' || c == '\t' || c == '\r' || c == '\n':
		return w.inside == 0
	}
	empties := w.value
	isKey := w.key
	w.key, w.value = false, false
	switch c {
	case ':':
		w.value = isKey
	case '"':
		w.text, w.emptied, w.matched = true, empties, -1
		if w.level == w.depth && w.inside == 0 {
			w.matched = 0
		}
	case '{', '[':
		if w.level++; empties {
			w.inside = w.level
			return true
		}
	case '}', ']':
		w.level = max(0, w.level-1)
		if w.level < w.inside {
			w.inside = 0
		}
	}
	return w.inside == 0
}

// inText is next within a string.
func (w *Withheld) inText(c byte) bool {
	name := w.member.name
	switch {
	case w.escaped:
		w.escaped = false
	case c == '\\':
		w.escaped, w.matched = true, -1
	case c == '"':
		w.key = w.matched == len(name)
		w.text, w.emptied = false, false
	case w.matched >= 0 && w.matched < len(name) && name[w.matched] == c:
		w.matched++
	default:
		w.matched = -1
	}
	return w.inside == 0 && !w.emptied
}

// inLine follows a stream's lines, and reports whether c is a byte of an event's data.
func (w *Withheld) inLine(c byte) bool {
	switch {
	case c == '\n' && (w.line == lineStart || w.line == eventStart): // an empty line ends the event
		*w = Withheld{src: w.src, member: w.member, depth: w.depth, events: true, blank: w.blank, begun: w.begun}
	case c == '\n':
		w.line = lineStart
	case w.line == dataLine:
		return true
	case w.line <= lineStart && c == '\r':
	case w.line == fieldName && c == ':':
		w.line = dataLine
	case w.line <= lineStart && c == 'd':
		w.line = fieldName
	case w.line <= lineStart && c < 0x80: // not of a byte order mark
		w.line = otherLine
	}
	return false
}
