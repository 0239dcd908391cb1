// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"net/http"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// sharedFolder gives both engines one folder.
func sharedFolder(extra map[string]string) func(*testing.T, *protocol) {
	return func(t *testing.T, c *protocol) {
		dir := t.TempDir()
		for _, side := range []*enginesim.Config{&c.prefill, &c.decode} {
			side.KVRole = enginesim.RoleBoth
			side.Extra = map[string]string{"shared_storage_path": dir}
			maps.Copy(side.Extra, extra)
		}
	}
}

func zmqAddresses(p, d *enginesim.Engine) (prefill, decode attributes) {
	of := func(e *enginesim.Engine) attributes {
		// an engine without the connector, in front of which somebody wrote an address all the same
		if e.SideChannel() == "" {
			return attributes{"zmqAddress": "127.0.0.1:1"}
		}
		return attributes{"zmqAddress": e.SideChannel()}
	}
	return of(p), of(d)
}

func unusedPort(t *testing.T) string {
	t.Helper()
	port, err := freeport.Find(1)
	require.NoError(t, err)
	return strconv.Itoa(port)
}

// A prompt of one token would end the engines (docs/protocols/sharedstorage.md, recording 11): the gateway refuses it,
// also where one engine alone would serve it.
func TestAPromptOfOneTokenReachesNoEngine(t *testing.T) {
	for _, c := range []protocol{
		{connector: "sharedstorage", prepare: sharedFolder(nil)},
		{connector: "multi", config: "{connectors: [{type: nixl}, {type: ExampleConnector}]}",
			prepare: sharedFolder(nil)},
		// Whichever connector a request is sent by, it is sent to the same engines.
		{connector: "http", prepare: sharedFolder(nil),
			spec:    "  rollout: {weight: 0, kvConnector: {type: sharedstorage}}\n",
			prefill: enginesim.Config{Connector: "sharedstorage"},
			decode:  enginesim.Config{Connector: "sharedstorage"}},
	} {
		t.Run(c.connector, func(t *testing.T) {
			x := c.start(t)
			for _, body := range []string{
				`{"model":"tiny","prompt":[65]}`, `{"model":"tiny","prompt":[65],"n":2,"prompt_logprobs":1}`,
				`{"model":"tiny","prompt":[[65,66],[67]]}`,
				`{"model":"tiny","prompt":"long enough","truncate_prompt_tokens":1}`,
				`{"model":"tiny","prompt":"long enough","truncate_prompt_tokens":-1}`,
			} {
				status, _, response := x.gateway.complete(body)
				assert.Equal(t, http.StatusBadRequest, status, response)
				assert.Contains(t, response, "one token")
			}
			assert.Empty(t, x.p.Requests())
			assert.Empty(t, x.d.Requests())
		})
	}
}

func storesProtocols() (rows []protocol) {
	plain := map[string]string{"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
	otherFolder := broken{func(t *testing.T, c *protocol) {
		extra := map[string]string{}
		maps.Copy(extra, c.decode.Extra)
		extra["shared_storage_path"] = t.TempDir()
		c.decode.Extra = extra
	}, reuse.NotReused, "the store is not shared"}

	rows = append(rows,
		protocol{connector: "sharedstorage", apis: vllmAPIs, prepare: sharedFolder(nil),
			broken: map[string]broken{"two folders": otherFolder, "D without a connector": loneD}},
		protocol{connector: "sharedstorage", name: "decode first", config: "{cacheHitThreshold: 0.5}",
			prepare: sharedFolder(map[string]string{"cache_hit_threshold": "1"}),
			broken:  map[string]broken{"two folders": otherFolder}},
		protocol{connector: "multi", config: "{connectors: [{type: nixl}, {kv_connector: ExampleConnector, kv_role: " +
			"kv_both}]}", apis: vllmAPIs, prepare: sharedFolder(nil),
			broken: map[string]broken{"D without a connector": loneD}},
		protocol{connector: "multi", name: "of stores", config: "{connectors: [{type: sharedstorage}]}", apis: vllmAPIs,
			prepare: sharedFolder(nil),
			broken:  map[string]broken{"two folders": otherFolder}},
		protocol{connector: "p2pnccl", apis: vllmAPIs, alone: true, attributes: zmqAddresses,
			prepare: func(_ *testing.T, c *protocol) { c.prefill.Extra, c.decode.Extra = plain, plain },
			broken:  map[string]broken{"D without a connector": loneD}},
		protocol{connector: "pynccl", apis: vllmAPIs, alone: true, prepare: func(t *testing.T, c *protocol) {
			port := unusedPort(t)
			c.prefill.SideChannel, c.decode.Extra = "127.0.0.1:"+port,
				map[string]string{"kv_ip": "127.0.0.1", "kv_port": port}
		}, broken: map[string]broken{"D without a connector": loneD}},
	)
	return rows
}
