// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// decodeJSON reads one JSON value and keeps its numbers as they are written.
func decodeJSON(raw []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one value")
	}
	return v, nil
}

// plainValue reads the value of a dotted argument or a variable. It may be JSON, or a word of Python or YAML for true,
// false or nothing. Anything else is text.
func plainValue(s string) any {
	switch strings.ToLower(s) {
	case "true":
		return true
	case "false":
		return false
	case "null", "none", "~":
		return nil
	}
	if v, err := decodeJSON([]byte(s)); err == nil {
		return v
	}
	return s
}

// text returns a member as text. A number counts as text, since engines treat "21001" and 21001 alike.
func text(m map[string]any, key string) string {
	switch v := m[key].(type) {
	case string:
		return v
	case json.Number:
		return v.String()
	case nil, map[string]any, []any:
		return ""
	case bool:
		return strconv.FormatBool(v)
	default:
		return fmt.Sprint(v)
	}
}

func object(m map[string]any, key string) map[string]any {
	if o, ok := m[key].(map[string]any); ok {
		return o
	}
	return map[string]any{}
}

// yes reads a switch. "True" and "1" mean yes.
func yes(m map[string]any, key string) bool {
	switch strings.ToLower(text(m, key)) {
	case "true", "1", "yes", "on":
		return true
	}
	return false
}

// count is the number of items that a member lists: 2 for "8300,8301" and [8300, 8301], 1 for 8300.
func count(m map[string]any, key string) int {
	if list, ok := m[key].([]any); ok {
		return len(list)
	}
	s := strings.TrimSpace(text(m, key))
	if s == "" {
		return 0
	}
	return strings.Count(s, ",") + 1
}

// port reads a port, or returns def if there is none.
func port(s string, def float64) int { return int(number(s, def)) }

// number reads a number, or returns def if there is none.
func number(s string, def float64) float64 {
	if n, err := strconv.ParseFloat(s, 64); err == nil {
		return n
	}
	return def
}
