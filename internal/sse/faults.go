// SPDX-License-Identifier: Apache-2.0

package sse

import (
	"bytes"
	"io"
)

// Faults passes a stream on, and puts the data of each event that tells an error through a function. Events are passed
// on as they come; only from an error on, near a stream's end, are they put together first.
type Faults struct {
	src  io.Reader
	fn   func(data []byte) ([]byte, error)
	mid  bool   // what went by does not end with a line
	held []byte // may begin a line that tells an error
	out  []byte // for a reader with less room than that
	rest io.Reader
}

// faultMarks are how lines begin whose data is an error of the OpenAI or the Anthropic API, as engines write them.
var faultMarks = [][]byte{[]byte("data: {\"error\":"), []byte("data: {\"type\":\"error\""),
	[]byte("data: {\"type\": \"error\"")}

// markName is where in a faultMark the name of the event's first member begins, with e or t.
const markName = len("data: {\"")

// smallRead is less than what a Faults may hold.
const smallRead = 64

// Watch makes f a reader of the stream src. fn is called with the data of an error, and with that of what follows it.
func (f *Faults) Watch(src io.Reader, fn func(data []byte) ([]byte, error)) {
	*f = Faults{src: src, fn: fn}
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

func (f *Faults) read(p []byte) (int, error) {
	for f.rest == nil {
		n, err := f.src.Read(p[copy(p, f.held):])
		b := p[:len(f.held)+n]
		f.held = nil
		at := f.find(b)
		if at >= 0 {
			f.rest = NewRewriter(io.MultiReader(bytes.NewReader(bytes.Clone(b[at:])), &ended{f.src, err}), true, f.fn)
			b, err = b[:at], nil
		} else if err == nil {
			b = f.hold(b)
		}
		if len(b) > 0 || err != nil {
			f.mid = len(b) > 0 && b[len(b)-1] != '\n'
			return len(b), err
		}
	}
	return f.rest.Read(p)
}

// find returns where in b the first error begins, -1 if there is none. It looks at the beginnings of lines only: a
// search for a word would stop at each quote.
func (f *Faults) find(b []byte) int {
	for at := 0; ; {
		if name := at + markName; name < len(b) && (b[name] == 'e' || b[name] == 't') && (at > 0 || !f.mid) {
			for _, mark := range faultMarks {
				if bytes.HasPrefix(b[at:], mark) {
					return at
				}
			}
		}
		next := bytes.IndexByte(b[at:], '\n')
		if next < 0 {
			return -1
		}
		for at += next + 1; at < len(b) && b[at] == '\n'; at++ {
		}
	}
}

// hold keeps back the last line of b if it may tell an error.
func (f *Faults) hold(b []byte) []byte {
	at := bytes.LastIndexByte(b, '\n') + 1
	last := b[at:]
	if len(last) == 0 || at == 0 && f.mid {
		return b
	}
	for _, mark := range faultMarks {
		if bytes.HasPrefix(mark, last) {
			f.held = bytes.Clone(last)
			return b[:at]
		}
	}
	return b
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
