// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Object checks a JSON object, mostly a handoff. Each method checks one key. The Object keeps the first fault; after it
// all checks do nothing. An Object belongs to one goroutine.
type Object struct {
	d   *jsonedit.Doc
	err error
}

var docs = sync.Pool{New: func() any { return new(jsonedit.Doc) }}

// Read begins the check of one JSON object. It requires that the object is well-formed in all its values, is valid
// UTF-8, and names no key twice. The caller must call [Object.Close]. blocks are keys whose lists [Object.Blocks] will
// check; Read does not read them.
func Read(raw []byte, blocks ...string) *Object {
	o := new(Object) // on the caller's stack, since the compiler inlines this function
	o.read(raw, blocks)
	return o
}

func (o *Object) read(raw []byte, blocks []string) {
	o.d = docs.Get().(*jsonedit.Doc)
	if o.d.ParseInto(raw) != nil || !utf8.Valid(raw) || !o.wellFormed(blocks) {
		o.err = errors.New("it is not a well-formed object without duplicate keys")
	}
}

// wellFormed checks nested values; jsonedit checks only their brackets.
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

// Fault records what is wrong with a key, unless there is a fault already.
func (o *Object) Fault(key, problem string) {
	if o.err == nil {
		o.err = fmt.Errorf("%s %s", key, problem)
	}
}

// Get returns a key's value as a part of the bytes that Read was given. A null is absent: raw is nil and ok is false.
func (o *Object) Get(key string) (raw []byte, ok bool) {
	if o.err != nil {
		return nil, false
	}
	if raw, ok = o.d.Get(key); jsonedit.Kind(raw) == jsonedit.Null {
		return nil, false
	}
	return raw, ok
}

// True requires true.
func (o *Object) True(key string) {
	if raw, _ := o.Get(key); string(raw) != "true" {
		o.Fault(key, "is not true")
	}
}

// NotTrue requires that a flag is absent, null or false.
func (o *Object) NotTrue(key string) {
	if raw, ok := o.Get(key); ok && string(raw) != "false" {
		o.Fault(key, "is not false")
	}
}

// Text requires a string that is not empty, and returns it as it is written, with quotes.
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

// Port requires a whole number from 1 to 65535.
func (o *Object) Port(key string) { o.Int(key, 1, maxPort) }

// Int requires a whole number from low to high.
func (o *Object) Int(key string, low, high int64) {
	raw, ok := o.Get(key)
	if !ok || !within(raw, low, high) {
		o.Fault(key, notWithin(low, high))
	}
}

// OptionalInt is Int for a key that may be absent or null. If the engine's default applies only to an absent key, the
// leg gets the object without the null: see [WithoutNulls].
func (o *Object) OptionalInt(key string, low, high int64) {
	if raw, ok := o.Get(key); ok && !within(raw, low, high) {
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

// OptionalObject requires an object if the key is there and not null.
func (o *Object) OptionalObject(key string) {
	if raw, ok := o.Get(key); ok && jsonedit.Kind(raw) != jsonedit.Object {
		o.Fault(key, "is not an object")
	}
}

// OptionalNumber requires a number of any kind if the key is there and not null.
func (o *Object) OptionalNumber(key string) {
	if raw, ok := o.Get(key); ok && jsonedit.Kind(raw) != jsonedit.Number {
		o.Fault(key, "is not a number")
	}
}

// Blocks requires nested lists of block ids of one of the given depths (1 is a flat list), and returns how many ids
// there are.
func (o *Object) Blocks(key string, depths ...int) int {
	raw, _ := o.Get(key)
	for _, depth := range depths {
		if n, ok := count(raw, depth); ok {
			return n
		}
	}
	o.Fault(key, "is not a list of block ids as it must be")
	return 0
}

// SomeBlocks is Blocks, and requires at least one id.
func (o *Object) SomeBlocks(key string, depths ...int) {
	if o.Blocks(key, depths...) == 0 {
		o.Fault(key, "is empty")
	}
}

// WithoutNulls returns an object without those of the keys that are null in it. Engines in Python read an optional key
// by dict.get with a default, which a null does not get: they calculate with None and die. Null is absent to pdkit, so
// such an engine gets no key. If none of them is null, WithoutNulls returns raw itself.
func WithoutNulls(raw json.RawMessage, keys ...string) json.RawMessage {
	if !mayBeNull(raw, keys) {
		return raw
	}
	for _, key := range keys {
		if v := gjson.GetBytes(raw, key); v.Type != gjson.Null || !v.Exists() {
			continue
		}
		if out, err := jsonedit.DeleteIn(raw, key); err == nil {
			raw = out
		}
	}
	return raw
}

// mayBeNull reports whether null follows one of the keys somewhere in an object. It is cheap, since each request asks.
func mayBeNull(raw []byte, keys []string) bool {
	for null := []byte("null"); ; {
		before, after, found := bytes.Cut(raw, null)
		if !found {
			return false
		}
		before = bytes.TrimRight(before, ": \t\r\n\"")
		if slices.ContainsFunc(keys, func(key string) bool { return bytes.HasSuffix(before, []byte(key)) }) {
			return true
		}
		raw = after
	}
}
