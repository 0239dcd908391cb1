// SPDX-License-Identifier: Apache-2.0

package nixl

import (
	"encoding/json"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// checkHandoff refuses what a real decode engine would die of, hang on, or answer wrongly to (captures/README.md §2.1,
// vLLM 0.32.0):
//
//   - remote_block_ids missing, null, empty or flat: the engine dies;
//   - remote_host, remote_port, remote_engine_id or remote_request_id missing: it hangs, and dies when the client leaves;
//   - do_remote_prefill not true: it hangs.
//
// The other keys may be missing or unknown, but those with which D reckons must be numbers: tp_size, dcp_size and pp_size, which have
// defaults where they are missing but not where they are null, and remote_num_tokens and remote_blocks_expiry_time, which may be null. The
// error names keys, never values.
func checkHandoff(raw json.RawMessage) error {
	if jsonedit.Kind(raw) != jsonedit.Object {
		return connector.NoTransfer("kv_transfer_params is not an object")
	}
	d, err := jsonedit.Parse(raw)
	if err != nil || !json.Valid(raw) || !utf8.Valid(raw) { // jsonedit checks only the brackets of nested values
		return connector.NoTransfer("kv_transfer_params is not a well-formed object without duplicate keys")
	}
	if v, _ := d.Get("do_remote_prefill"); string(v) != "true" {
		return connector.NoTransfer("do_remote_prefill is not true")
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
	return checkBlocks(d)
}

func isText(d *jsonedit.Doc, key string) bool {
	v, ok := d.Get(key)
	if !ok || jsonedit.Kind(v) != jsonedit.String {
		return false
	}
	s, err := jsonedit.Unquote(v)
	return err == nil && s != ""
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
	blocks, flat, bad := 0, false, false
	gjson.ParseBytes(raw).ForEach(func(_, group gjson.Result) bool {
		if !group.IsArray() {
			flat = true
			return false
		}
		group.ForEach(func(_, id gjson.Result) bool {
			n, isInt := jsonedit.Int([]byte(id.Raw))
			bad = bad || id.Type != gjson.Number || !isInt || n < 0
			blocks++
			return !bad
		})
		return !bad
	})
	switch {
	case flat:
		return connector.NoTransfer("remote_block_ids is not an array of arrays")
	case bad:
		return connector.NoTransfer("remote_block_ids holds something that is not a block id")
	case blocks == 0:
		return connector.NoTransfer("remote_block_ids is empty")
	}
	return nil
}
