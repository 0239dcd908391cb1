// SPDX-License-Identifier: Apache-2.0

package handoff

import "encoding/json"

// maxNested is how deep a value of a handoff may be. No engine's is deeper than a few, while those who read it in
// Python recurse: their limits are 200 (pydantic's reader) to 1000.
const maxNested = 64

// WellFormed judges a nested value, of which package jsonedit checks only the brackets.
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
