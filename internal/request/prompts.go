// SPDX-License-Identifier: Apache-2.0

package request

import "bytes"

// severalPrompts reports whether a JSON array holds more than one prompt. An array of numbers is one prompt of token
// ids; an array of strings, arrays or objects is a list of prompts. It reads only the first element, so a prompt of a
// million tokens costs nothing. The brackets are known to be balanced (internal/jsonedit has checked them).
func severalPrompts(raw []byte) bool {
	rest := bytes.TrimLeft(raw[1:], " \t\r\n")
	if len(rest) == 0 {
		return false
	}
	var end int
	switch rest[0] {
	case '"':
		end = stringEnd(rest)
	case '[', '{':
		end = containerEnd(rest)
	default:
		return false
	}
	rest = bytes.TrimLeft(rest[end:], " \t\r\n")
	return len(rest) > 0 && rest[0] == ','
}

func emptyArray(raw []byte) bool {
	return raw[0] == '[' && bytes.TrimLeft(raw[1:], " \t\r\n")[0] == ']'
}

// stringEnd returns the offset after the string at the start of b.
func stringEnd(b []byte) int {
	for i := 1; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i + 1
		}
	}
	return len(b)
}

func containerEnd(b []byte) int {
	depth := 0
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			i += stringEnd(b[i:]) - 1
		case '[', '{':
			depth++
		case ']', '}':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return len(b)
}
