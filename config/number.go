// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"encoding/json"
	"math"
	"strconv"
	"strings"
)

// Number is an engine's setting that users write as a number or as a string: vLLM's own examples have kv_buffer_size
// "8e9" and kv_port "21001". Engines accept both, and a configuration that is copied from an engine must load as it
// stands.
type Number struct {
	Value float64
	Given bool
}

// UnmarshalJSON reads 8e9 and "8e9".
func (n *Number) UnmarshalJSON(raw []byte) error {
	text := string(bytes.TrimSpace(raw))
	if strings.HasPrefix(text, `"`) {
		if json.Unmarshal(raw, &text) != nil {
			text = ""
		}
		text = strings.TrimSpace(text)
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsInf(v, 0) || math.IsNaN(v) {
		return &FieldError{Problem: "is not a number", Remedy: `write a number, or one in quotes as "8e9"`}
	}
	*n = Number{v, true}
	return nil
}

// String writes the number in full.
func (n Number) String() string { return strconv.FormatFloat(n.Value, 'f', -1, 64) }
