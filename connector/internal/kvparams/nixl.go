// SPDX-License-Identifier: Apache-2.0

// Package kvparams has what vLLM's connectors that hand over KV as NIXL does have in common: the prefill leg's
// parameters, and the check of the handoff in P's response. It is internal since it follows one engine's code from
// release to release.
package kvparams

import (
	"encoding/json"
	"math"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
)

// Ask is the prefill leg's parameters. They ask P to keep its blocks and to say where they are. Engines read only
// do_remote_decode; the nulls are what every proxy sends.
var Ask = json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false,` +
	`"remote_engine_id":null,"remote_block_ids":null,` +
	`"remote_host":null,"remote_port":null}`)

// The flags by which an engine with NIXL says which way the KV of its handoff goes.
const (
	RemotePrefill = "do_remote_prefill" // in P's response: D reads the prompt's KV
	RemoteDecode  = "do_remote_decode"  // in D's response: P reads the conversation's KV for the next turn
)

// NIXL refuses a handoff of which a real decode engine would die, on which it would hang, or to which it would respond
// wrongly (docs/protocols/nixl.md §3, vLLM 0.32.0):
//
//   - remote_block_ids missing, null, empty or flat: the engine dies;
//   - remote_host, remote_port, remote_engine_id or remote_request_id missing: it hangs, and dies when the client
//     leaves;
//   - flag not true: it hangs. flag is do_remote_prefill, or do_remote_decode for KV that goes from D to P.
//
// The other keys may be missing, null or unknown. Those with which D calculates must be numbers: [sizes],
// remote_num_tokens and remote_blocks_expiry_time.
func NIXL(raw json.RawMessage, flag string) error {
	o := handoff.Read(raw, Blocks)
	CheckNIXL(o, flag)
	return o.Close()
}

// CachedTokens is the key of P's count of cached tokens, which the scheduler of vLLM 0.31.0 and later adds to every
// handoff with [RemotePrefill]. A D of that release tells it in its usage in place of its own count, in which all that
// it took over is cached (docs/protocols/prompt-members.md).
const CachedTokens = "remote_prefill_cached_tokens"

// Usage is what vLLM's engines say of cached tokens where D gets P's handoff.
var Usage = connector.Serving{ReusedInUsage: true, CountKey: CachedTokens}

// Blocks is the key of the lists of block ids.
const Blocks = "remote_block_ids"

// CheckNIXL is [NIXL] for connectors that go on to check more. They have read the object with [Blocks].
func CheckNIXL(o *handoff.Object, flag string) {
	o.True(flag)
	o.Text("remote_engine_id")
	o.Text("remote_request_id")
	o.Text("remote_host")
	o.Port("remote_port")
	for _, key := range sizes {
		o.OptionalInt(key, 1, math.MaxInt64)
	}
	for _, key := range [...]string{"remote_num_tokens", CachedTokens} {
		o.OptionalInt(key, 0, math.MaxInt64)
	}
	o.OptionalNumber("remote_blocks_expiry_time")
	o.SomeBlocks(Blocks, 2)
}

// sizes are the keys that have a default in D if they are absent, and end its engine if they are null.
var sizes = [...]string{"tp_size", "dcp_size", "pp_size"}

// ForDecode is a checked handoff as D gets it: P's bytes, without sizes that are null.
func ForDecode(raw json.RawMessage) json.RawMessage { return handoff.WithoutNulls(raw, sizes[:]...) }
