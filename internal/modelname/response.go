// SPDX-License-Identifier: Apache-2.0

package modelname

import (
	"io"
	"unsafe"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Mark is in each event and in each whole response that names its model. No text has it, since a quote in a text is
// escaped.
var Mark = []byte(`"model"`)

// places are where the APIs' events and whole responses have the model's name: at the top level, in the events of the
// Responses API, and in message_start of the Messages API.
var places = [...]string{"model", "response.model", "message.model"}

// namer returns the name for the client, as JSON, in place of an engine's.
type namer func(engines string) []byte

// namer returns a function that gives a client the name that it has asked for, whichever name the engine has written:
// one that serves a model by several names writes the first. A client that has named no model, asked being "", gets the
// first of the clients' names.
func (n *Names) namer(asked string) namer {
	if asked == "" {
		return func(engines string) []byte { return jsonedit.Quote(n.First(engines)) }
	}
	name := jsonedit.Quote(asked)
	return func(string) []byte { return name }
}

// PutBack returns a function that writes the name that a client has asked for into an event or a whole response. What
// the function returns is valid until its next call, and is data itself if that names no model.
func (n *Names) PutBack(asked string) func(data []byte) []byte {
	name := n.namer(asked)
	var buf []byte
	return func(data []byte) []byte {
		text := unsafe.String(unsafe.SliceData(data), len(data)) // data does not change meanwhile
		for _, place := range places {
			v := gjson.Get(text, place)
			if v.Type != gjson.String || v.Index <= 0 {
				continue
			}
			buf = append(append(append(buf[:0], data[:v.Index]...), name(v.Str)...), data[v.Index+len(v.Raw):]...)
			return buf
		}
		return data
	}
}

// Reader returns a reader of a whole response that has the name that a client has asked for at its top level. It holds
// nothing back but an engine's name, so that the response may be of any size.
func (n *Names) Reader(src io.Reader, asked string) io.Reader {
	return &reader{src: src, name: n.namer(asked), in: make([]byte, 32<<10)}
}

type reader struct {
	src  io.Reader
	name namer
	in   []byte
	out  []byte // what Read has not returned yet
	err  error

	depth   int // objects and arrays that are open
	text    bool
	escaped bool // after a backslash in a text
	matched int  // bytes of the text that are of the member's name; -1: it is another one
	key     bool // the name was read, and may be a key
	value   bool // its colon was read
	drop    bool // the text is the engine's name
	dropped []byte
	done    bool // the rest stays as it is
}

const (
	member  = "model"
	maxName = 4 << 10 // bytes of an engine's name
)

func (r *reader) Read(p []byte) (int, error) {
	if r.done && len(r.out) == 0 && r.err == nil {
		return r.src.Read(p)
	}
	for len(r.out) == 0 && r.err == nil {
		var n int
		n, r.err = r.src.Read(r.in)
		r.out = r.out[:0]
		for i, c := range r.in[:n] {
			if r.done {
				r.out = append(r.out, r.in[i:n]...)
				break
			}
			r.next(c)
		}
	}
	if len(r.out) == 0 {
		return 0, r.err
	}
	n := copy(p, r.out)
	r.out = r.out[n:]
	return n, nil
}

// next reads one byte.
func (r *reader) next(c byte) {
	if r.text {
		r.inText(c)
		return
	}
	switch c {
	case ' ', '\t', '\r', '\n':
	case '"':
		if r.text, r.matched = true, -1; r.value {
			r.drop = true
			return
		}
		if r.key = false; r.depth == 1 {
			r.matched = 0
		}
	case ':':
		r.key, r.value = false, r.key
	default:
		switch r.key, r.value = false, false; c {
		case '{', '[':
			r.depth++
		case '}', ']':
			r.depth--
		}
	}
	r.out = append(r.out, c)
}

// inText is next within a text.
func (r *reader) inText(c byte) {
	switch {
	case !r.drop:
		r.out = append(r.out, c)
	case len(r.dropped) < maxName:
		r.dropped = append(r.dropped, c)
	}
	switch {
	case r.escaped:
		r.escaped = false
	case c == '\\':
		r.escaped, r.matched = true, -1
	case c == '"':
		r.text, r.key, r.done = false, r.matched == len(member), r.drop
		if r.drop {
			engines, _ := jsonedit.Unquote(append([]byte(`"`), r.dropped...))
			r.out = append(r.out, r.name(engines)...)
		}
	case r.matched >= 0 && r.matched < len(member) && member[r.matched] == c:
		r.matched++
	default:
		r.matched = -1
	}
}
