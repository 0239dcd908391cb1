// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"errors"
)

// member is one top-level member of a JSON object. Both parts are slices of the scanned bytes.
type member struct {
	name  []byte
	value []byte
}

var errNotObject = errors.New("the body is not one JSON object")

// scanObject lists the top-level members of a JSON object in their order, duplicates included. known returns the length
// of a value that the caller recognises, and 0 for any other: a recognised value, such as a long prompt, is not scanned
// again. Names are compared as they are written, since nobody escapes a name here.
func scanObject(dst []member, body []byte, known func(name, rest []byte) int) ([]member, error) {
	i := skipSpace(body, 0)
	if i >= len(body) || body[i] != '{' {
		return dst, errNotObject
	}
	for i = skipSpace(body, i+1); ; i = skipSpace(body, i+1) {
		if i < len(body) && body[i] == '}' && len(dst) == 0 {
			break
		}
		end := skipString(body, i)
		if end < 0 {
			return dst, errNotObject
		}
		name := body[i+1 : end-1]
		if i = skipSpace(body, end); i >= len(body) || body[i] != ':' {
			return dst, errNotObject
		}
		i = skipSpace(body, i+1)
		length := 0
		if known != nil {
			length = known(name, body[i:])
		}
		if end = i + length; length == 0 {
			end = skipValue(body, i)
		}
		if end < 0 {
			return dst, errNotObject
		}
		dst = append(dst, member{name: name, value: body[i:end]})
		if i = skipSpace(body, end); i >= len(body) || body[i] != ',' {
			break
		}
	}
	if i >= len(body) || body[i] != '}' || skipSpace(body, i+1) != len(body) {
		return dst, errNotObject
	}
	return dst, nil
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// skipString returns the index after the string that starts at i, or -1.
func skipString(b []byte, i int) int {
	if i >= len(b) || b[i] != '"' {
		return -1
	}
	for from := i + 1; ; {
		n := bytes.IndexByte(b[from:], '"')
		if n < 0 {
			return -1
		}
		quote := from + n
		back := quote
		for back > i+1 && b[back-1] == '\\' {
			back--
		}
		if (quote-back)%2 == 0 {
			return quote + 1
		}
		from = quote + 1
	}
}

// skipValue returns the index after the value that starts at i, or -1.
func skipValue(b []byte, i int) int {
	if i >= len(b) {
		return -1
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		for depth := 0; i < len(b); {
			switch b[i] {
			case '"':
				if i = skipString(b, i); i < 0 {
					return -1
				}
				continue
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
			i++
		}
		return -1
	}
	start := i
	for i < len(b) && bytes.IndexByte([]byte(",}] \n\t\r"), b[i]) < 0 {
		i++
	}
	if i == start {
		return -1
	}
	return i
}
