// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"testing"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

func mooncakeProtocols() (rows []protocol) {
	bootstrap := func(p, _ *enginesim.Engine) (attributes, attributes) {
		return attributes{"bootstrapURL": p.Bootstrap()}, nil
	}
	socket := func(p, _ *enginesim.Engine) (attributes, attributes) { return attributes{"p2pPort": sidePort(p)}, nil }
	// otherwise gives D other settings than P's.
	otherwise := func(name, value string) func(*testing.T, *protocol) {
		return func(_ *testing.T, c *protocol) {
			extra := map[string]string{}
			maps.Copy(extra, c.decode.Extra)
			extra[name] = value
			c.decode.Extra = extra
		}
	}
	rows = append(rows,
		protocol{
			connector: "mooncake", apis: vllmAPIs, attributes: bootstrap,
			broken: map[string]broken{"D without a connector": loneD},
		},
		protocol{
			connector: "mooncake-store", apis: vllmAPIs,
			prepare: func(t *testing.T, c *protocol) {
				c.prefill.Extra = map[string]string{"store": t.TempDir()}
				c.decode.Extra = c.prefill.Extra
			},
			broken: map[string]broken{
				"hash seeds that differ": {otherwise("hash_seed", "1"), reuse.NotReused, "PYTHONHASHSEED"},
				"another namespace":      {otherwise("cache_prefix", "other"), reuse.NotReused, "store"},
				"D without a connector":  loneD,
			},
		},
		protocol{
			connector: "offload-p2p", apis: vllmAPIs, attributes: socket,
			broken: map[string]broken{
				"hash seeds that differ": {otherwise("PYTHONHASHSEED", "1"), reuse.NotReused, "PYTHONHASHSEED"},
				"D without a connector":  loneD,
			},
		},
		protocol{name: "serial", connector: "offload-p2p", config: "{dispatch: serial}", apis: vllmAPIs,
			attributes: socket},
	)
	return rows
}
