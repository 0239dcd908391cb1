// SPDX-License-Identifier: Apache-2.0

// Package kvparams has what vLLM's connectors share that hand KV on as NIXL's do: what the prefill leg asks, and what P's response must hold. It
// is internal since it follows one engine's code from release to release.
package kvparams

import (
	"encoding/json"
	"math"

	"github.com/pdkit/pdkit/connector/handoff"
)

// Ask are the parameters with which a prefill leg asks P to keep its blocks and to say where they are. Engines read only
// do_remote_decode; the nulls are what every proxy sends.
var Ask = json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,` +
	`"remote_host":null,"remote_port":null}`)

// The flags by which an engine with NIXL says what its handoff is for.
const (
	RemotePrefill = "do_remote_prefill" // P's answer: D is to take the prompt's KV
	RemoteDecode  = "do_remote_decode"  // D's answer: P is to take the conversation's KV for the next turn
)

// NIXL refuses what a real decode engine would die of, hang on, or answer wrongly to (docs/protocols/nixl.md §3, vLLM
// 0.32.0):
//
//   - remote_block_ids missing, null, empty or flat: the engine dies;
//   - remote_host, remote_port, remote_engine_id or remote_request_id missing: it hangs, and dies when the client leaves;
//   - the flag, do_remote_prefill or for the way back do_remote_decode, not true: it hangs.
//
// The other keys may be missing or unknown, but those with which D reckons must be numbers: tp_size, dcp_size and pp_size, which have
// defaults where they are missing but not where they are null, and remote_num_tokens and remote_blocks_expiry_time, which may be null. also,
// unless it is nil, asks for more.
func NIXL(raw json.RawMessage, flag string, also func(*handoff.Object)) error {
	const blocks = "remote_block_ids"
	o := handoff.Read(raw, blocks)
	o.True(flag)
	o.Text("remote_engine_id")
	o.Text("remote_request_id")
	o.Text("remote_host")
	o.Port("remote_port")
	for _, key := range [...]string{"tp_size", "dcp_size", "pp_size"} {
		o.OptionalInt(key, 1, math.MaxInt64, false)
	}
	for _, key := range [...]string{"remote_num_tokens", "remote_prefill_cached_tokens"} {
		o.OptionalInt(key, 0, math.MaxInt64, true)
	}
	o.OptionalNumber("remote_blocks_expiry_time")
	o.SomeBlocks(blocks, 2)
	if also != nil && o.Err() == nil {
		also(o)
	}
	return o.Close()
}
