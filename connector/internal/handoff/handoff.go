// SPDX-License-Identifier: Apache-2.0

// Package handoff checks the kv_transfer_params with which one vLLM engine tells another where KV lies, before they are relayed. It is
// what the connectors of NIXL share.
package handoff

import (
	"bytes"
	"encoding/json"
	"sync"
	"unicode/utf8"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// The flags by which an engine says what its handoff is for.
const (
	Prefill = "do_remote_prefill" // P's answer: D is to take the prompt's KV
	Decode  = "do_remote_decode"  // D's answer: P is to take the conversation's KV for the next turn
)

// OfAnswer returns the handoff of P's answer, byte for byte, once it is known to be complete, and good for also, unless that is nil. The
// error is [connector.ErrNoTransfer] if it is not.
func OfAnswer(p *connector.PrefillResult, also func(*jsonedit.Doc) error) (json.RawMessage, error) {
	if p == nil {
		return nil, connector.NoTransfer("decode was described before prefill answered")
	}
	if err := p.Err(); err != nil {
		return nil, connector.NoTransfer("the answer is not one JSON object")
	}
	raw, ok := p.Field(connector.ParamsMember)
	if !ok {
		return nil, connector.NoTransfer("kv_transfer_params is absent or null")
	}
	return raw, check(raw, Prefill, also)
}

var docs = sync.Pool{New: func() any { return new(jsonedit.Doc) }}

// Check refuses what a real decode engine would die of, hang on, or answer wrongly to (captures/README.md §2.1,
// vLLM 0.32.0):
//
//   - remote_block_ids missing, null, empty or flat: the engine dies;
//   - remote_host, remote_port, remote_engine_id or remote_request_id missing: it hangs, and dies when the client leaves;
//   - the flag, do_remote_prefill or for the way back do_remote_decode, not true: it hangs.
//
// The other keys may be missing or unknown, but those with which D reckons must be numbers: tp_size, dcp_size and pp_size, which have
// defaults where they are missing but not where they are null, and remote_num_tokens and remote_blocks_expiry_time, which may be null. The
// error names keys, never values.
func Check(raw json.RawMessage, flag string) error { return check(raw, flag, nil) }

func check(raw json.RawMessage, flag string, also func(*jsonedit.Doc) error) error {
	if jsonedit.Kind(raw) != jsonedit.Object {
		return connector.NoTransfer("kv_transfer_params is not an object")
	}
	d := docs.Get().(*jsonedit.Doc)
	defer func() { d.Reset(); docs.Put(d) }()
	err := d.ParseInto(raw)
	if err != nil || !utf8.Valid(raw) || !wellFormed(d) {
		return connector.NoTransfer("kv_transfer_params is not a well-formed object without duplicate keys")
	}
	if v, _ := d.Get(flag); string(v) != "true" {
		return connector.NoTransfer("%s is not true", flag)
	}
	for _, key := range []string{"remote_engine_id", "remote_request_id", "remote_host"} {
		if !isText(d, key) {
			return connector.NoTransfer("%s is not a string with text", key)
		}
	}
	if port, ok := integer(d, "remote_port"); !ok || port < 1 || port > 65535 {
		return connector.NoTransfer("remote_port is not a port number")
	}
	for _, key := range []string{"tp_size", "dcp_size", "pp_size"} {
		if v, ok := d.Get(key); ok {
			if n, isInt := jsonedit.Int(v); !isInt || n < 1 {
				return connector.NoTransfer("%s is not a positive count", key)
			}
		}
	}
	for _, key := range []string{"remote_num_tokens", "remote_prefill_cached_tokens"} {
		if v, ok := d.Get(key); ok && jsonedit.Kind(v) != jsonedit.Null {
			if n, isInt := jsonedit.Int(v); !isInt || n < 0 {
				return connector.NoTransfer("%s is not a count", key)
			}
		}
	}
	const expiry = "remote_blocks_expiry_time"
	if v, ok := d.Get(expiry); ok && jsonedit.Kind(v) != jsonedit.Null && jsonedit.Kind(v) != jsonedit.Number {
		return connector.NoTransfer("%s is not a number", expiry)
	}
	if err := checkBlocks(d); err != nil || also == nil {
		return err
	}
	return also(d)
}

// wellFormed looks into nested values, of which jsonedit checks only the brackets. The block ids are checked by themselves.
func wellFormed(d *jsonedit.Doc) bool {
	for i := range d.Len() {
		switch v := d.Value(i); jsonedit.Kind(v) {
		case jsonedit.Object, jsonedit.Array:
			if d.Name(i) != "remote_block_ids" && !json.Valid(v) {
				return false
			}
		}
	}
	return true
}

// isText wants a string that is not empty.
func isText(d *jsonedit.Doc, key string) bool {
	v, ok := d.Get(key)
	if !ok || jsonedit.Kind(v) != jsonedit.String || len(v) == len(`""`) {
		return false
	}
	if bytes.IndexByte(v, '\\') < 0 {
		return true // the common case, without a copy
	}
	_, err := jsonedit.Unquote(v)
	return err == nil
}

func integer(d *jsonedit.Doc, key string) (int64, bool) {
	v, ok := d.Get(key)
	if !ok {
		return 0, false
	}
	return jsonedit.Int(v)
}

// checkBlocks wants one array of block ids per KV cache group, and at least one block in all. Nesting is significant, so a
// flat list is as bad as none.
func checkBlocks(d *jsonedit.Doc) error {
	raw, ok := d.Get("remote_block_ids")
	if !ok || jsonedit.Kind(raw) != jsonedit.Array {
		return connector.NoTransfer("remote_block_ids is not an array")
	}
	switch blocks, ok := countBlocks(raw); {
	case !ok:
		return connector.NoTransfer("remote_block_ids is not an array of arrays of block ids")
	case blocks == 0:
		return connector.NoTransfer("remote_block_ids is empty")
	}
	return nil
}

// countBlocks reads [[1,2],[3]] strictly, in one pass and without a copy: a long prompt has thousands of blocks. Brackets are known to
// be balanced, and raw begins and ends with one.
func countBlocks(raw []byte) (blocks int, ok bool) {
	i := space(raw, 1)
	if raw[i] == ']' {
		return 0, i+1 == len(raw)
	}
	for {
		if raw[i] != '[' {
			return 0, false
		}
		if i = space(raw, i+1); raw[i] != ']' {
			for {
				start := i
				for raw[i] >= '0' && raw[i] <= '9' {
					i++
				}
				if n := i - start; n == 0 || n > 1 && raw[start] == '0' {
					return 0, false
				} else if n > 18 { // may not fit 64 bits
					if _, fits := jsonedit.Int(raw[start:i]); !fits {
						return 0, false
					}
				}
				blocks++
				if i = space(raw, i); raw[i] == ']' {
					break
				}
				if raw[i] != ',' {
					return 0, false
				}
				i = space(raw, i+1)
			}
		}
		switch i = space(raw, i+1); raw[i] {
		case ']':
			return blocks, i+1 == len(raw)
		case ',':
			i = space(raw, i+1)
		default:
			return 0, false
		}
	}
}

// space returns the offset of the next byte that is no white space. There is always one: the closing bracket.
func space(b []byte, i int) int {
	for b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r' {
		i++
	}
	return i
}
