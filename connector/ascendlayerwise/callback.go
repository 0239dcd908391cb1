// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise

import (
	"encoding/json"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// engineIDs are the ids that D's engine may have for a request that was sent with X-Request-Id id. They are without the
// random suffix of 9 characters, which D cuts off before it calls back. The first id is the usual one (vLLM 0.32.0,
// vllm/entrypoints; docs/protocols/nixl.md, recordings 22 to 24; docs/protocols/vllm.md §2). A Response is sub-request
// 0 of the engine's request or, in releases without sub-requests, the request itself.
func engineIDs(api connector.API, id string) []string {
	switch api {
	case connector.APICompletions:
		return []string{"cmpl-" + id + "-0"}
	case connector.APIChat, connector.APIMessages:
		return []string{"chatcmpl-" + id}
	case connector.APIResponses:
		return []string{id + "_0", id}
	case connector.APIGenerate:
		return []string{"generate-tokens-" + id}
	}
	return nil
}

// callbackID reads the request id of a callback. ok is false if the body is not one JSON object with that member.
func callbackID(body []byte) (id string, ok bool) {
	d, err := jsonedit.Parse(body)
	if err != nil {
		return "", false
	}
	raw, ok := d.Get("request_id")
	if !ok || jsonedit.Kind(raw) != jsonedit.String {
		return "", false
	}
	id, err = jsonedit.Unquote(raw)
	return id, err == nil && id != ""
}

// optional are the keys that P gets only if they are not null.
var optional = [...]string{"remote_cached_tokens", "remote_block_size", "remote_tp_size", "remote_pcp_size",
	"remote_dcp_size"}

// checkCallback refuses a callback of which P's engine would die, or for which it would not push. Without
// remote_block_ids, remote_block_size or remote_tp_size P's worker calculates with None; a missing remote_cached_tokens
// ends the scheduler. The [optional] keys may be absent, since older engines of both sides did not have them. blocks is
// how many blocks D waits for; if it is 0, P has nothing to push.
func checkCallback(body json.RawMessage) (blocks int, err error) {
	o := handoff.Read(body, "remote_block_ids")
	o.Text("request_id")
	o.True("do_remote_decode")
	o.NotTrue("do_remote_prefill")
	o.Text("remote_engine_id")
	o.Text("remote_host")
	o.Port("remote_port")
	for _, key := range optional[2:] {
		o.OptionalInt(key, 1, 1<<20)
	}
	o.OptionalInt("remote_cached_tokens", 0, 1<<40)
	// remote_block_size is a number, or a list with a number for each group of the cache.
	if raw, ok := o.Get("remote_block_size"); ok && jsonedit.Kind(raw) == jsonedit.Array {
		o.SomeBlocks("remote_block_size", 1)
	} else {
		o.OptionalInt("remote_block_size", 1, 1<<20)
	}
	blocks = o.Blocks("remote_block_ids", 2)
	return blocks, o.Close()
}
