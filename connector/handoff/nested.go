// SPDX-License-Identifier: Apache-2.0

package handoff

import "encoding/json"

// maxNested is the deepest nesting that a value of a handoff may have. No engine nests more than a few levels. Engines
// that read a handoff in Python recurse, and fail at 200 (pydantic's reader) to 1000 levels.
const maxNested = 64

// WellFormed checks a nested value; package jsonedit checks only its brackets.
func WellFormed(raw json.RawMessage) bool { return shallow(raw) && json.Valid(raw) }

func shallow(raw []byte) bool {
	depth := 0
	for i := 0; i < len(raw); i++ {
		switch raw[i] {
		case '"':
			for i++; i < len(raw) && raw[i] != '"'; i++ {
				if raw[i] == '\\' {
					i++
				}
			}
		case '[', '{':
			if depth++; depth > maxNested {
				return false
			}
		case ']', '}':
			depth--
		}
	}
	return true
}
