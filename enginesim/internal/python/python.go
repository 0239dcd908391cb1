// SPDX-License-Identifier: Apache-2.0

// Package python writes values as the engines' servers do, which are Python programs.
package python

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
	"strings"
)

// Object is a JSON object: names and values in turn, in the order in which they are written. nil is null.
type Object []any

// MarshalJSON implements json.Marshaler.
func (o Object) MarshalJSON() ([]byte, error) { return Encode(o), nil }

// With is the object with more members. One that is there keeps its place.
func (o Object) With(more Object) Object {
	out := append(Object{}, o...)
next:
	for i := 0; i < len(more); i += 2 {
		for at := 0; at < len(o); at += 2 {
			if out[at] == more[i] {
				out[at+1] = more[i+1]
				continue next
			}
		}
		out = append(out, more[i], more[i+1])
	}
	return out
}

// Encode is json.Marshal without escapes for HTML, as Python's encoders have it.
func Encode(v any) []byte { return write(nil, v) }

func write(to []byte, v any) []byte {
	switch v := v.(type) {
	case Object:
		if v == nil {
			return append(to, "null"...)
		}
		return list(to, '{', '}', len(v)/2, func(to []byte, i int) []byte {
			return write(append(write(to, v[2*i]), ':'), v[2*i+1])
		})
	case []Object:
		return list(to, '[', ']', len(v), func(to []byte, i int) []byte { return write(to, v[i]) })
	// What most members are: package json needs an encoder for each.
	case nil:
		return append(to, "null"...)
	case int:
		return strconv.AppendInt(to, int64(v), 10)
	case string:
		if !strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r >= 0x7f || r == '"' || r == '\\' }) {
			return append(append(append(to, '"'), v...), '"')
		}
	}
	b := bytes.NewBuffer(to)
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return append(to, "null"...)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

func list(to []byte, begin, end byte, items int, item func([]byte, int) []byte) []byte {
	to = append(to, begin)
	for i := range items {
		if i > 0 {
			to = append(to, ',')
		}
		to = item(to, i)
	}
	return append(to, end)
}

// Number writes a float as Python's client does: always with a fraction or an exponent.
func Number(v float64) string {
	switch {
	case math.IsInf(v, 1):
		return "+Inf"
	case v == math.Trunc(v) && math.Abs(v) < 1e6:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case v == math.Trunc(v):
		return strconv.FormatFloat(v, 'e', -1, 64)
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}

// Truthy reports whether Python takes a JSON value for true.
func Truthy(raw json.RawMessage) bool {
	switch string(raw) {
	case "", "null", "false", "0", `""`, "[]", "{}":
		return false
	}
	return true
}
