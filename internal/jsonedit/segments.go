// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"io"
	"slices"
)

// copyUpTo is the size up to which a new value is copied: joined to the text around it, it costs less than a segment of
// its own.
const copyUpTo = 128

// Segments is an edited document as a list of slices. It is filled by Doc.Splice. The zero Segments is empty. Any
// number of goroutines may read it at once, by whatever method; none may while Splice fills it again or Reset runs.
type Segments struct {
	parts [][]byte
	size  int64

	// The part being built: of the body, or of own. Neighbours are joined here.
	src    []byte
	lo, hi int
	isOwn  bool

	own    []byte  // text that is in neither body nor edits; never grown after start
	chosen []int32 // for each member, the edit that counts + 1
	added  []int32 // the edits that count for new names
}

// Reset forgets all the documents, so that pooled Segments keep none of them in memory, and gives up memory of unusual
// size.
func (s *Segments) Reset() {
	s.clear()
	const usual = 256
	if cap(s.parts) > usual {
		s.parts = nil
	}
	if cap(s.chosen) > usual {
		s.chosen = nil
	}
	if cap(s.added) > usual {
		s.added = nil
	}
	if cap(s.own) > usual*copyUpTo {
		s.own = nil
	}
}

func (s *Segments) clear() {
	clear(s.parts)
	s.parts, s.size = s.parts[:0], 0
	s.src, s.lo, s.hi, s.isOwn = nil, 0, 0, false
	s.own, s.chosen, s.added = s.own[:0], s.chosen[:0], s.added[:0]
}

// keep adds body[lo:hi].
func (s *Segments) keep(body []byte, lo, hi int) {
	switch {
	case lo == hi:
	case !s.isOwn && s.hi == lo && s.src != nil:
		s.hi = hi
	default:
		s.flush()
		s.src, s.lo, s.hi, s.isOwn = body, lo, hi, false
	}
}

// written adds what was appended to own after from.
func (s *Segments) written(from int) {
	if s.isOwn {
		s.src, s.hi = s.own, len(s.own)
		return
	}
	s.flush()
	s.src, s.lo, s.hi, s.isOwn = s.own, from, len(s.own), true
}

// value adds a value of an edit.
func (s *Segments) value(raw []byte) {
	from := len(s.own)
	switch {
	case len(raw) == 0:
		s.own = append(s.own, "null"...)
		s.written(from)
	case len(raw) <= copyUpTo:
		s.own = append(s.own, raw...)
		s.written(from)
	default:
		s.flush()
		s.parts = append(s.parts, slices.Clip(raw))
		s.size += int64(len(raw))
	}
}

// flush closes the part being built.
func (s *Segments) flush() {
	if s.hi > s.lo {
		s.parts = append(s.parts, s.src[s.lo:s.hi:s.hi])
		s.size += int64(s.hi - s.lo)
	}
	s.src, s.lo, s.hi, s.isOwn = nil, 0, 0, false
}

// Len returns the length of the document in bytes.
func (s *Segments) Len() int64 { return s.size }

// AppendTo appends the document to dst, growing it at most once.
func (s *Segments) AppendTo(dst []byte) []byte {
	dst = slices.Grow(dst, int(s.size))
	for _, p := range s.parts {
		dst = append(dst, p...)
	}
	return dst
}

// NewReader returns a reader of the document from its start.
func (s *Segments) NewReader() *Reader {
	return &Reader{parts: s.parts, left: s.size}
}

// Reader reads an edited document. Several may read one Segments at once; one Reader is for one goroutine.
type Reader struct {
	parts [][]byte // what is left; the slice and the bytes are shared
	off   int      // into the first
	left  int64
}

// Len returns how many bytes are still to be read.
func (r *Reader) Len() int { return int(r.left) }

// Read implements io.Reader.
func (r *Reader) Read(p []byte) (n int, err error) {
	if r.left == 0 {
		return 0, io.EOF
	}
	for n < len(p) && len(r.parts) > 0 {
		c := copy(p[n:], r.parts[0][r.off:])
		n += c
		r.advance(c)
	}
	return n, nil
}

// WriteTo implements io.WriterTo. A writer with WriteBuffers gets all parts at once: to a socket that is one system
// call, where there would be one for each part.
func (r *Reader) WriteTo(w io.Writer) (n int64, err error) {
	if all, ok := w.(interface {
		WriteBuffers(parts [][]byte) (int64, error)
	}); ok {
		parts := append(make([][]byte, 0, len(r.parts)), r.parts...)
		if len(parts) > 0 {
			parts[0] = parts[0][r.off:]
		}
		n, err = all.WriteBuffers(parts)
		r.skip(n)
		return n, err
	}
	for len(r.parts) > 0 {
		p := r.parts[0][r.off:]
		c, err := w.Write(p)
		if c < 0 || c > len(p) {
			return n, io.ErrShortWrite
		}
		n += int64(c)
		r.advance(c)
		if err != nil {
			return n, err
		}
		if c < len(p) {
			return n, io.ErrShortWrite
		}
	}
	return n, nil
}

// skip moves on over any number of parts.
func (r *Reader) skip(n int64) {
	for n > 0 && len(r.parts) > 0 {
		step := min(n, int64(len(r.parts[0])-r.off))
		r.advance(int(step))
		n -= step
	}
}

func (r *Reader) advance(n int) {
	r.off += n
	r.left -= int64(n)
	if r.off == len(r.parts[0]) {
		r.parts, r.off = r.parts[1:], 0
	}
}
