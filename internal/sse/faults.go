// SPDX-License-Identifier: Apache-2.0

package sse

import (
	"bytes"
	"io"
	"slices"
)

// Faults passes a stream on, and puts each event that may tell an error through a function: one whose data has the word
// "error" as a JSON string, one that is named so, and one that by its name is the stream's ending, unless the function
// leaves it as it is. Events are passed on as they come; from the first such event on, near a stream's end, they are
// put together.
//
// An event that a read cuts is held back until it is whole, or longer than maxHeld. Of a longer one the rest is passed
// on unseen unless its beginning has the word.
type Faults struct {
	src  io.Reader
	ends []string // names of events
	fn   func(event, data []byte) ([]byte, error)
	mid  bool   // what went by ends within an event
	line bool   // and with a line
	held []byte // the beginning of an event
	out  []byte // for a reader with less room than that
	rest io.Reader
}

const (
	maxHeld   = 1 << 10
	smallRead = 2 * maxHeld // what is held and the next read find room in more
)

var (
	fault = []byte("error")
	named = []byte("event:")
)

// Watch makes f a reader of the stream src. fn is called with an event that may be an error or has one of the names in
// ends, and with each that follows it. It returns data itself to leave the event as it is. With an error the stream
// ends, behind the data that fn returns with it.
func (f *Faults) Watch(src io.Reader, ends []string, fn func(event, data []byte) ([]byte, error)) {
	*f = Faults{src: src, ends: ends, fn: fn}
}

// Read implements io.Reader.
func (f *Faults) Read(p []byte) (int, error) {
	if len(p) >= smallRead && len(f.out) == 0 {
		return f.read(p)
	}
	if len(f.out) == 0 {
		b := make([]byte, smallRead)
		n, err := f.read(b)
		if f.out = b[:n]; n == 0 {
			return 0, err
		}
	}
	n := copy(p, f.out)
	f.out = f.out[n:]
	return n, nil
}

// Holds reports whether the next Read may have something to return without reading the source.
func (f *Faults) Holds() bool { return f.rest != nil || len(f.out) > 0 }

// Held returns how many bytes of the last read are held back, of those that it had room for.
func (f *Faults) Held() int { return len(f.held) }

func (f *Faults) read(p []byte) (int, error) {
	for f.rest == nil {
		n, err := f.src.Read(p[copy(p, f.held):])
		b := p[:len(f.held)+n]
		f.held = f.held[:0]
		at := f.find(b)
		if f.ends != nil {
			at = f.findEnd(b, at)
		}
		if at >= 0 {
			f.rest = &Rewriter{src: io.MultiReader(bytes.NewReader(bytes.Clone(b[at:])), &ended{f.src, err}),
				events: true, judge: f.fn}
			b, err = b[:at], nil
		} else if err == nil {
			b = f.hold(b)
		}
		if len(b) > 0 || err != nil {
			f.mid = f.end(b) < len(b)
			f.line = len(b) > 0 && b[len(b)-1] == '\n'
			return len(b), err
		}
	}
	return f.rest.Read(p)
}

// find returns where in b the first event begins that may be an error, -1 if there is none. Of the letters of error it
// looks for the r, which events have least of, and then for its second one.
func (f *Faults) find(b []byte) int {
	for at := 2; at < len(b); at++ {
		j := bytes.IndexByte(b[at:], 'r')
		if j < 0 {
			break
		}
		if at += j; at+1 == len(b) || b[at+1] != 'r' || !bytes.HasPrefix(b[at-1:], fault) {
			continue
		}
		word, end := at-1, at-1+len(fault)
		quoted := b[word-1] == '"' && end < len(b) && b[end] == '"'
		if !quoted && string(bytes.TrimRight(b[bytes.LastIndexByte(b[:word], '\n')+1:word], " ")) != "event:" {
			continue
		}
		if start := f.end(b[:word]); start > 0 || !f.mid {
			return start
		}
	}
	return -1
}

// findEnd returns where in b an event begins that has the name of an ending, unless fn leaves it as it is, or it will
// be held until it is whole. at is where another event begins that is put through fn, or -1: the first one counts.
func (f *Faults) findEnd(b []byte, at int) int {
	for from := 0; ; {
		j := bytes.Index(b[from:], named)
		if j < 0 || at >= 0 && from+j >= at {
			return at
		}
		line := from + j
		from = line + len(named)
		name := bytes.TrimPrefix(b[from:], space)
		n := bytes.IndexByte(name, '\n')
		if n < 0 || line > 0 && !bytes.HasSuffix(b[:line], []byte("\n")) || !f.isEnd(bytes.TrimSuffix(name[:n], cr)) {
			continue
		}
		start := f.end(b[:line])
		switch event, _, whole := Next(b[start:]); {
		case start == 0 && f.mid: // its beginning has been passed on
		case !whole && len(b)-start > maxHeld:
			return start
		case whole:
			data := Data(event)
			if changed, err := f.fn(event, data); err != nil || len(changed) == 0 || &changed[0] != &data[0] {
				return start
			}
		}
	}
}

func (f *Faults) isEnd(name []byte) bool {
	return slices.ContainsFunc(f.ends, func(end string) bool { return string(name) == end })
}

var (
	space = []byte(" ")
	cr    = []byte("\r")
)

// hold keeps back the last event of b if it is not whole.
func (f *Faults) hold(b []byte) []byte {
	at := f.end(b)
	if last := b[at:]; len(last) <= maxHeld && (at > 0 || !f.mid) {
		f.held = append(f.held, last...)
		return b[:at]
	}
	return b
}

// end returns where in b the last event ends that ends in it, 0 if none does.
func (f *Faults) end(b []byte) int {
	for end := len(b); end > 0; {
		i := bytes.LastIndexByte(b[:end], '\n')
		before := bytes.TrimSuffix(b[:max(i, 0)], []byte("\r"))
		switch n := len(before); {
		case i < 0:
			return 0
		case n > 0 && before[n-1] == '\n', n == 0 && f.mid && f.line:
			return i + 1
		}
		end = i
	}
	return 0
}

// ended is a reader that may have said already how it ended.
type ended struct {
	src io.Reader
	err error
}

func (e *ended) Read(p []byte) (int, error) {
	if e.err != nil {
		return 0, e.err
	}
	return e.src.Read(p)
}
