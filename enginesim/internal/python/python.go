// SPDX-License-Identifier: Apache-2.0

// Package python writes values as the engines' servers do, which are Python programs.
package python

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
)

// Encode is json.Marshal without escapes for HTML, as Python's encoders have it.
func Encode(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return []byte("null")
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// Number writes a float as Python's client does: always with a fraction or an exponent.
func Number(v float64) string {
	switch {
	case math.IsInf(v, 1):
		return "+Inf"
	case v == math.Trunc(v) && math.Abs(v) < 1e6:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case v == math.Trunc(v):
		s := strconv.FormatFloat(v, 'e', -1, 64)
		return s
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
