// SPDX-License-Identifier: Apache-2.0

// Package sse reads and rewrites server-sent events (WHATWG HTML, "Server-sent events") without decoding a stream that
// nobody wants changed.
package sse

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"slices"
)

// Done is the data of the event that ends a stream of the OpenAI API.
var Done = []byte("[DONE]")

// Next cuts the first whole event off b: the lines before an empty one, and what follows that.
func Next(b []byte) (event, rest []byte, ok bool) { return NextFrom(b, 0) }

// NextFrom is Next for a b in which no event ends before i: who reads a large event in many pieces searches each byte
// once. What was searched in vain ends 2 bytes before the end of b.
func NextFrom(b []byte, i int) (event, rest []byte, ok bool) {
	for {
		j := bytes.IndexByte(b[i:], '\n')
		if j < 0 {
			return nil, nil, false
		}
		i += j + 1
		switch {
		case i < len(b) && b[i] == '\n':
			return b[:i], b[i+1:], true
		case i+1 < len(b) && b[i] == '\r' && b[i+1] == '\n':
			return b[:i], b[i+2:], true
		}
	}
}

var mark = []byte("\ufeff") // of the byte order, which may begin the stream

// Data returns an event's data: that of one line is a part of event, those of several are joined by newlines.
func Data(event []byte) []byte {
	var data []byte
	lines := 0
	for line := range bytes.Lines(event) {
		line = bytes.TrimPrefix(line, mark)
		value, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("data:"))
		if !ok {
			continue
		}
		value = bytes.TrimPrefix(value, []byte(" "))
		switch lines++; lines {
		case 1:
			data = value
			continue
		case 2:
			data = bytes.Clone(data) // from here on it is no part of event
		}
		data = append(append(data, '\n'), value...)
	}
	return data
}

const (
	// maxRewritten is the largest event, or whole response, that is rewritten.
	maxRewritten = 64 << 20
	readSize     = 4 << 10
)

// ErrTooLarge is the error of an event, or a whole response, that is too large to be rewritten.
var ErrTooLarge = errors.New("sse: an event of the response is too large")

// Rewriter passes every event's data, or a whole response, through a function. Events without data (comments) and
// [DONE] stay as they are.
type Rewriter struct {
	src    io.Reader
	events bool
	mark   []byte
	fn     func(data []byte) ([]byte, error)
	judge  func(event, data []byte) ([]byte, error) // in place of fn, where not nil; an error may come with data

	in    []byte // read; what begins at from is not yet an event
	from  int
	at    int    // how much of that has been searched for the event's end
	out   []byte // rewritten
	taken int    // how much of out was taken
	err   error
}

// NewRewriter returns a reader of src as fn changes it. A nil result of fn drops the event. data is valid until fn
// returns. events is false for a response that is no stream. A stream's events without mark stay as they are; nil is in
// every event.
func NewRewriter(src io.Reader, events bool, mark []byte, fn func(data []byte) ([]byte, error)) *Rewriter {
	return &Rewriter{src: src, events: events, mark: mark, fn: fn}
}

// Holds reports whether the next Read may have something to return without reading the source.
func (r *Rewriter) Holds() bool { return r.taken < len(r.out) || r.err != nil }

// Whole returns a whole response that has been rewritten. ok is false before the first Read has returned, and of a
// stream.
func (r *Rewriter) Whole() (b []byte, ok bool) { return r.out, !r.events && errors.Is(r.err, io.EOF) }

// Read implements io.Reader.
func (r *Rewriter) Read(p []byte) (int, error) {
	if r.events && r.mark != nil && len(r.in) == r.from && !r.Holds() {
		n, err := r.src.Read(p)
		if !bytes.Contains(p[:n], r.mark) && endsEvent(p[:n]) {
			return n, err // as most reads are: whole events, and nothing to change
		}
		r.in, r.from = append(r.in[:0], p[:n]...), 0
		r.out, r.taken = reused(r.out, nil), 0
		r.filled(err)
	}
	for r.taken == len(r.out) {
		if r.err != nil {
			return 0, r.err
		}
		r.out, r.taken = reused(r.out, nil), 0
		r.fill()
	}
	n := copy(p, r.out[r.taken:])
	r.taken += n
	return n, nil
}

// maxReused is the largest buffer that a stream keeps, since streams are many and last long.
const maxReused = 4 * readSize

// reused is a buffer that holds rest alone, which may be a part of it.
func reused(b, rest []byte) []byte {
	if cap(b) > maxReused {
		return bytes.Clone(rest)
	}
	return append(b[:0], rest...)
}

func (r *Rewriter) fill() {
	if r.from > 0 {
		r.in, r.from = reused(r.in, r.in[r.from:]), 0
	}
	r.in = slices.Grow(r.in, readSize)
	n, err := r.src.Read(r.in[len(r.in) : len(r.in)+readSize])
	r.in = r.in[:len(r.in)+n]
	r.filled(err)
}

// endsEvent reports whether b ends where an event does.
func endsEvent(b []byte) bool {
	return len(b) == 0 || bytes.HasSuffix(b, []byte("\n\n")) || bytes.HasSuffix(b, []byte("\n\r\n"))
}

// filled rewrites what has been read; err came with it.
func (r *Rewriter) filled(err error) {
	if len(r.in) > maxRewritten {
		r.err = ErrTooLarge
		return
	}
	if r.events {
		r.rewriteEvents()
	}
	if err == nil || r.err != nil {
		return
	}
	r.err = err
	if !errors.Is(err, io.EOF) {
		return
	}
	if r.events { // a last event without its empty line
		if last := r.in[r.from:]; r.judge != nil {
			r.err = cmp.Or(r.change(last, last), err)
		} else {
			r.out = append(r.out, last...)
		}
	} else if r.out, err = r.fn(r.in); err != nil {
		r.err = err
	}
	r.in, r.from = nil, 0
}

func (r *Rewriter) rewriteEvents() {
	for {
		in := r.in[r.from:]
		event, rest, ok := NextFrom(in, r.at)
		if !ok {
			r.at = max(0, len(in)-2) // a large event comes in many reads, and each byte is searched once
			return
		}
		r.at = 0
		whole := in[:len(in)-len(rest)]
		if r.err = r.change(event, whole); r.err != nil {
			return
		}
		r.from += len(whole)
	}
}

// change puts an event through the function. whole is the event with its empty line.
func (r *Rewriter) change(event, whole []byte) error {
	data := Data(event)
	if len(data) == 0 || bytes.Equal(data, Done) || r.mark != nil && !bytes.Contains(data, r.mark) {
		r.out = append(r.out, whole...)
		return nil
	}
	var changed []byte
	var err error
	if r.judge != nil {
		changed, err = r.judge(event, data)
	} else {
		changed, err = r.fn(data)
	}
	switch {
	case changed == nil || err != nil && r.judge == nil:
	case r.judge != nil && &changed[0] == &data[0]:
		r.out = append(r.out, whole...)
	default:
		r.out = AppendEvent(r.out, event, changed)
	}
	return err
}

// Named reports whether an event has a name: its field event.
func Named(event []byte, name string) bool {
	for line := range bytes.Lines(event) {
		if value, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("event:")); ok {
			return string(bytes.TrimPrefix(value, []byte(" "))) == name
		}
	}
	return false
}

// AppendEvent writes an event with new data and its other fields as they were.
func AppendEvent(dst, event, data []byte) []byte {
	for line := range bytes.Lines(event) {
		if len(bytes.TrimRight(line, "\r\n")) > 0 && !bytes.HasPrefix(bytes.TrimPrefix(line, mark), []byte("data:")) {
			dst = append(dst, line...)
		}
	}
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		dst = append(dst, "data: "...)
		dst = append(dst, line...)
		dst = append(dst, '\n')
	}
	return append(dst, '\n')
}
