// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"unicode/utf8"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Object is a JSON object under check, mostly a handoff. Each method asks one thing of one key; the first fault is
// kept, and what is asked after it does nothing. An Object belongs to one goroutine.
type Object struct {
	d   *jsonedit.Doc
	err error
}

var docs = sync.Pool{New: func() any { return new(jsonedit.Doc) }}

// Read begins the check of one JSON object: it is well-formed down to its last value, valid UTF-8, and names no key
// twice. [Object.Close] must be called. blocks are keys whose lists [Object.Blocks] will check, so that they are not
// read twice.
func Read(raw []byte, blocks ...string) *Object {
	o := &Object{d: docs.Get().(*jsonedit.Doc)}
	if o.d.ParseInto(raw) != nil || !utf8.Valid(raw) || !o.wellFormed(blocks) {
		o.err = errors.New("it is not a well-formed object without duplicate keys")
	}
	return o
}

// wellFormed looks into nested values, of which jsonedit checks only the brackets.
func (o *Object) wellFormed(but []string) bool {
	for i := range o.d.Len() {
		v := o.d.Value(i)
		switch jsonedit.Kind(v) {
		case jsonedit.Object, jsonedit.Array:
			if !slices.Contains(but, o.d.Name(i)) && !WellFormed(v) {
				return false
			}
		}
	}
	return true
}

// Close ends the check and returns its first fault.
func (o *Object) Close() error {
	o.d.Reset()
	docs.Put(o.d)
	o.d = nil
	return o.err
}

// Err returns the first fault so far.
func (o *Object) Err() error { return o.err }

// Fault notes what is wrong with a key.
func (o *Object) Fault(key, problem string) {
	if o.err == nil {
		o.err = fmt.Errorf("%s %s", key, problem)
	}
}

// Get returns a key's value, which is part of what was read. Null counts as absent.
func (o *Object) Get(key string) (raw []byte, ok bool) {
	if o.err != nil {
		return nil, false
	}
	raw, ok = o.d.Get(key)
	return raw, ok && jsonedit.Kind(raw) != jsonedit.Null
}

// True wants true.
func (o *Object) True(key string) {
	if raw, _ := o.Get(key); string(raw) != "true" {
		o.Fault(key, "is not true")
	}
}

// NotTrue wants a flag that is absent, null or false.
func (o *Object) NotTrue(key string) {
	if raw, ok := o.Get(key); ok && string(raw) != "false" {
		o.Fault(key, "is not false")
	}
}

// Text wants a string that is not empty, and returns it as it is written, with quotes.
func (o *Object) Text(key string) []byte {
	raw, ok := o.Get(key)
	if ok = ok && jsonedit.Kind(raw) == jsonedit.String && len(raw) > len(`""`); ok && bytes.IndexByte(raw, '\\') >= 0 {
		_, err := jsonedit.Unquote(raw)
		ok = err == nil
	}
	if !ok {
		o.Fault(key, "is not a string with text")
	}
	return raw
}

const maxPort = 65535

// Port wants a whole number from 1 to 65535.
func (o *Object) Port(key string) { o.Int(key, 1, maxPort) }

// Int wants a whole number from low to high.
func (o *Object) Int(key string, low, high int64) {
	raw, ok := o.Get(key)
	if !ok || !within(raw, low, high) {
		o.Fault(key, notWithin(low, high))
	}
}

// OptionalInt is Int for a key that may be absent. nullable says that null will do, too: an engine's default often
// stands only where the key is absent.
func (o *Object) OptionalInt(key string, low, high int64, nullable bool) {
	if o.err != nil {
		return
	}
	raw, ok := o.d.Get(key)
	if !ok || nullable && jsonedit.Kind(raw) == jsonedit.Null {
		return
	}
	if !within(raw, low, high) {
		o.Fault(key, notWithin(low, high))
	}
}

func within(raw []byte, low, high int64) bool {
	n, ok := jsonedit.Int(raw)
	return ok && n >= low && n <= high
}

func notWithin(low, high int64) string {
	switch {
	case low == 1 && high == maxPort:
		return "is not a port number"
	case high < 1<<20:
		return fmt.Sprintf("is not a number from %d to %d", low, high)
	case low > 0:
		return "is not a positive count"
	}
	return "is not a count"
}

// OptionalObject wants an object, or nothing. Null is a fault.
func (o *Object) OptionalObject(key string) {
	if o.err != nil {
		return
	}
	if raw, ok := o.d.Get(key); ok && jsonedit.Kind(raw) != jsonedit.Object {
		o.Fault(key, "is not an object")
	}
}

// OptionalNumber wants a number of any kind, null, or nothing.
func (o *Object) OptionalNumber(key string) {
	if raw, ok := o.Get(key); ok && jsonedit.Kind(raw) != jsonedit.Number {
		o.Fault(key, "is not a number")
	}
}

// Blocks wants lists of block ids, depth deep, and returns how many there are.
func (o *Object) Blocks(key string, depth int) int {
	raw, _ := o.Get(key)
	n, ok := count(raw, depth)
	if !ok {
		o.Fault(key, "is not a list of block ids as it must be")
		return 0
	}
	return n
}

// SomeBlocks is Blocks with one at least.
func (o *Object) SomeBlocks(key string, depth int) {
	if o.Blocks(key, depth) == 0 {
		o.Fault(key, "is empty")
	}
}
