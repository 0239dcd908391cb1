// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

func sidePort(e *enginesim.Engine) string {
	_, port, _ := net.SplitHostPort(e.SideChannel())
	return port
}

func moriPorts(p, d *enginesim.Engine) (attributes, attributes) {
	return attributes{"handshakePort": sidePort(p), "notifyPort": sidePort(p)},
		attributes{"handshakePort": sidePort(d), "notifyPort": sidePort(d)}
}

func ascendProtocols() (rows []protocol) {
	rows = append(rows,
		protocol{
			connector: "mooncake-ascend", apis: vllmAPIs,
			broken: map[string]broken{
				"D without a connector": loneD,
				"P without a connector": loneP,
			},
		},
		protocol{
			connector: "ascend-layerwise", config: `{callbackListen: "127.0.0.1:0"}`, apis: vllmAPIs,
			broken: map[string]broken{
				"D without a connector, which never calls back": {loneD.change, reuse.NotReused,
					"the prefill engines counted no prompt"},
			},
		},
		protocol{
			connector: "moriio", name: "write", alone: true, apis: vllmAPIs, attributes: moriPorts,
			broken: map[string]broken{"engines that read": {func(_ *testing.T, c *protocol) {
				// of a release in which such a D does not compute the prompt itself
				c.prefill.Extra = map[string]string{"read_mode": "true", "version": "0.28"}
				c.decode.Extra = c.prefill.Extra
			}, reuse.Wrong, "decode read KV that is not the prompt's"}},
		},
		protocol{ // D's rank is seldom P's, and must tell P about its blocks all the same
			connector: "moriio", name: "write, D of three ranks", alone: true, apis: vllmAPIs,
			decode: enginesim.Config{Extra: map[string]string{"data_parallel_size_local": "3"}},
			attributes: func(p, d *enginesim.Engine) (attributes, attributes) {
				pa, da := moriPorts(p, d)
				da["dpSize"] = "3"
				return pa, da
			},
		},
		protocol{
			connector: "moriio", name: "read of vLLM 0.28, whose blocks are a flat list", config: `{mode: read}`,
			alone: true, attributes: moriPorts,
			prefill: enginesim.Config{Extra: map[string]string{"read_mode": "true", "version": "0.28"}},
			decode:  enginesim.Config{Extra: map[string]string{"read_mode": "true", "version": "0.28"}},
		},
		protocol{ // engines that write do so one after the other, too
			connector: "moriio", name: "read of engines that write", config: `{mode: read}`, alone: true,
			attributes: moriPorts,
		},
		protocol{
			connector: "moriio", name: "read", config: `{mode: read}`, alone: true, apis: vllmAPIs,
			prefill: enginesim.Config{Extra: map[string]string{"read_mode": "true"}},
			decode:  enginesim.Config{Extra: map[string]string{"read_mode": "true"}},
			attributes: func(p, d *enginesim.Engine) (attributes, attributes) { // as an engine announces itself
				pa := attributes{"zmqAddress": "host:127.0.0.1,handshake:" + sidePort(p) + ",notify:" + sidePort(p)}
				return pa, attributes{"zmqAddress": "host:127.0.0.1,handshake:" + sidePort(d) + ",notify:" +
					sidePort(d)}
			},
			broken: map[string]broken{"P without a connector": {func(t *testing.T, c *protocol) {
				c.prefill.Connector = "none"
				c.attributes = func(_, d *enginesim.Engine) (attributes, attributes) {
					require.NotNil(t, d)
					a := attributes{"zmqAddress": "host:127.0.0.1,handshake:" + sidePort(d) + ",notify:" + sidePort(d)}
					return a, a
				}
			}, reuse.Failed, "no usable KV handoff"}},
		},
	)
	return rows
}
