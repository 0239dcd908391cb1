// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
)

var errBody = errors.New("the body is not a JSON object")

// member has the offsets of a top-level member in the body. A comma lies between a member and the next one.
type member struct{ name, nameEnd, value, end int }

// scan finds the top-level members in one pass. It skips strings and decodes nothing.
func scan(b []byte) ([]member, error) {
	members := make([]member, 0, 16)
	i := space(b, 0)
	if i == len(b) || b[i] != '{' {
		return nil, errBody
	}
	for {
		if i = space(b, i+1); i == len(b) || b[i] != '"' {
			break
		}
		m := member{name: i + 1}
		i = str(b, i)
		m.nameEnd = i - 1
		if i = space(b, i); i == len(b) || b[i] != ':' {
			return nil, errBody
		}
		m.value = space(b, i+1)
		m.end = value(b, m.value)
		members = append(members, m)
		if i = space(b, m.end); i == len(b) || b[i] != ',' {
			break
		}
	}
	if i == len(b) || b[i] != '}' || space(b, i+1) != len(b) {
		return nil, errBody
	}
	return members, nil
}

func space(b []byte, i int) int {
	for i < len(b) && b[i] <= ' ' {
		i++
	}
	return i
}

// str returns the index behind the string that begins at i, or len(b).
func str(b []byte, i int) int {
	for i++; ; i++ {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			return len(b)
		}
		i += n
		escapes := 0
		for b[i-1-escapes] == '\\' {
			escapes++
		}
		if escapes%2 == 0 {
			return i + 1
		}
	}
}

// value returns the index behind the value that begins at i, or len(b).
func value(b []byte, i int) int {
	for depth := 0; i < len(b); {
		switch b[i] {
		case '"':
			i = str(b, i)
		case '{', '[':
			depth++
			i++
		case '}', ']':
			if depth == 0 {
				return i
			}
			depth--
			i++
		case ',':
			if depth == 0 {
				return i
			}
			i++
		default:
			i++
			continue
		}
		if depth == 0 {
			return i
		}
	}
	return len(b)
}

// prefillBody returns the client's body changed so that the engine makes one token, does not stream, and returns a
// handoff.
func prefillBody(body []byte, members []member) *buffer {
	const params = `"max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,` +
		`"do_remote_prefill":false,` +
		`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}`
	out := newBuffer(len(body) + len(params) + len(`"max_completion_tokens":1,`))
	out.bytes = append(out.bytes, '{')
	for _, m := range members {
		switch string(body[m.name:m.nameEnd]) {
		case "max_tokens", "stream", "stream_options", "min_tokens", "kv_transfer_params":
		case "max_completion_tokens":
			out.bytes = append(out.bytes, `"max_completion_tokens":1,`...)
		default:
			out.bytes = append(append(out.bytes, body[m.name-1:m.end]...), ',')
		}
	}
	out.bytes = append(out.bytes, params...)
	return out
}

// decodeBody is the client's body with the handoff.
func decodeBody(body []byte, members []member, handoff []byte) *buffer {
	out := newBuffer(len(body) + len(`"kv_transfer_params":,`) + len(handoff))
	out.bytes = append(out.bytes, '{')
	for _, m := range members {
		if string(body[m.name:m.nameEnd]) != "kv_transfer_params" {
			out.bytes = append(append(out.bytes, body[m.name-1:m.end]...), ',')
		}
	}
	out.bytes = append(out.bytes, `"kv_transfer_params":`...)
	out.bytes = append(out.bytes, handoff...)
	out.bytes = append(out.bytes, '}')
	return out
}

// handoffOf finds the transfer parameters in a prefill response.
func handoffOf(response []byte) ([]byte, bool) {
	members, err := scan(response)
	if err != nil {
		return nil, false
	}
	for _, m := range members {
		if string(response[m.name:m.nameEnd]) == "kv_transfer_params" && response[m.value] == '{' {
			return response[m.value:m.end], true
		}
	}
	return nil, false
}
