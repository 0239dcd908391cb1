// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/pdkit/pdkit/pdflow/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

func init() {
	loneD := broken{func(_ *testing.T, c *protocol) { c.decode.Connector = "none" }, reuse.NotReused,
		"never asked its KV connector"}
	loneP := broken{func(_ *testing.T, c *protocol) { c.prefill.Connector = "none" }, reuse.Failed,
		"no usable KV handoff"}
	relayed := map[string]broken{"D without a connector": loneD, "P without a connector": loneP}
	protocols = append(protocols,
		protocol{
			connector: "relay", apis: vllmAPIs, broken: relayed,
			config: `{required: {uuid: integer, remote_block_ids: list, remote_host: string, remote_port: string}, ` +
				`endsByLength: true, leaseDuration: 180s}`,
		},
		protocol{ // with parameters on P, as NIXL wants them
			connector: "relay", name: "nixl", apis: vllmAPIs, broken: relayed,
			prefill: enginesim.Config{Connector: "nixl"}, decode: enginesim.Config{Connector: "nixl"},
			config: `{prefill: {do_remote_decode: true}, leaseDuration: 30s, required: {do_remote_prefill: flag, ` +
				`remote_block_ids: list, remote_engine_id: string, remote_request_id: string, remote_port: integer}}`,
		},
		protocol{connector: "tpu", apis: vllmAPIs, broken: relayed},
		protocol{connector: "mooncake-hybrid", apis: vllmAPIs, broken: relayed},
		protocol{connector: "kvbm", apis: vllmAPIs, broken: relayed},
	)
	for _, name := range []string{"ascend-store", "flexkv", "hf3fs", "ucm"} {
		protocols = append(protocols, protocol{
			connector: name, apis: vllmAPIs,
			prepare: func(t *testing.T, c *protocol) {
				c.prefill.Extra = map[string]string{"store": t.TempDir()}
				c.decode.Extra = c.prefill.Extra
			},
			broken: map[string]broken{
				"a store for each engine": {func(t *testing.T, c *protocol) {
					c.decode.Extra = map[string]string{"store": t.TempDir()}
				}, reuse.NotReused, "store is not shared"},
				"D without a connector": loneD,
			},
		})
	}
}
