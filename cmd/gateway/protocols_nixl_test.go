// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

func nixlPushProtocols() (rows []protocol) {
	push := protocol{
		name: "together", connector: "nixl-push", apis: vllmAPIs,
		prefill: enginesim.Config{EngineID: "pdkit-prefill"},
		attributes: func(p, _ *enginesim.Engine) (attributes, attributes) {
			host, port, err := net.SplitHostPort(p.SideChannel())
			if err != nil { // of a P that has none
				host, port = "127.0.0.1", "5600"
			}
			return attributes{"engineID": "pdkit-prefill", "sideChannelHost": host, "sideChannelPort": port}, nil
		},
		broken: map[string]broken{
			"D without a connector": loneD,
			"P without a connector": loneP,
			"an engineID that is not P's": {func(_ *testing.T, c *protocol) { c.prefill.EngineID = "another" },
				reuse.Failed, ""},
		},
	}
	serial := push
	serial.name, serial.config, serial.attributes = "serial", "{dispatch: serial}", nil
	serial.broken = map[string]broken{
		"P without a connector": loneP,
		"P with the pull connector": {func(_ *testing.T, c *protocol) { c.prefill.Connector = "nixl" }, reuse.Failed,
			"no usable KV handoff"},
	}
	bothWays := map[string]string{"bidirectional_kv_xfer": "true"}
	rows = append(rows, push, serial, protocol{
		name: "bidirectional", connector: "nixl", config: "{bidirectional: true}", apis: vllmAPIs,
		prefill: enginesim.Config{Extra: bothWays}, decode: enginesim.Config{Extra: bothWays},
	})
	return rows
}

// A conversation of three turns through the gateway: P takes over from D what D has answered, and computes what is new.
func TestConversationThroughTheGateway(t *testing.T) {
	bothWays := map[string]string{"bidirectional_kv_xfer": "true", "kv_recompute_threshold": "0"}
	c := protocol{connector: "nixl", config: "{bidirectional: true}", prefill: enginesim.Config{Extra: bothWays},
		decode: enginesim.Config{Extra: bothWays, StreamParams: true}}
	x := c.start(t)
	for _, c := range []struct {
		api    connector.API
		stream bool
	}{{connector.APICompletions, false}, {connector.APIChat, false}, {connector.APICompletions, true},
		{connector.APIChat, true}} {
		api := c.api
		t.Run(fmt.Sprint(api, " streamed: ", c.stream), func(t *testing.T) {
			session := fmt.Sprint("talk-", api, c.stream)
			said := fmt.Sprintf("A first question of some length, by %s, so that the prompt has more than one block. ",
				session)
			type message map[string]string
			messages := []message{{"role": "user", "content": said}}
			for turn := range 3 {
				request := map[string]any{"model": "tiny", "max_tokens": 40, "temperature": 0, "stream": c.stream}
				if api == connector.APIChat {
					request["messages"] = messages
				} else {
					request["prompt"] = said
				}
				raw, err := json.Marshal(request)
				require.NoError(t, err)
				before := x.p.Stats()
				status, _, response := do(t, http.MethodPost, x.gateway.client+api.Path(), string(raw), "X-Session-ID",
					session)
				require.Equal(t, http.StatusOK, status, "%s\n%s", response, x.gateway.log)
				_, _, want := do(t, http.MethodPost, x.alone.URL()+api.Path(), string(raw))
				assert.Equal(t, texts(t, want), texts(t, response), "turn %d", turn)
				assert.Contains(t, response, `"kv_transfer_params":{}`, "the engines' affair")
				assert.NotContains(t, response, "remote_")
				assert.NotRegexp(t, `token_ids":\[`, response)
				taken := x.p.Stats().ExternalKVTransfer - before.ExternalKVTransfer
				if turn == 0 {
					assert.Zero(t, taken)
				} else {
					assert.Positive(t, taken, "P has computed what D had, in turn %d", turn)
				}
				reply := texts(t, response)
				messages = append(messages, message{"role": "assistant", "content": reply},
					message{"role": "user", "content": "And then?"})
				said += reply + " And then?"
			}
		})
	}
	// A prompt of the same conversation that goes another way takes nothing.
	before := x.p.Stats().ExternalKVTransfer
	status, _, _ := x.gateway.complete(
		`{"model":"tiny","prompt":"something else altogether, and long enough for a block or two","max_tokens":4}`,
		"X-Session-ID", "talk-completionsfalse")
	assert.Equal(t, http.StatusOK, status)
	assert.Equal(t, before, x.p.Stats().ExternalKVTransfer)

	x.clean(t)
}

// D waits for a P that never writes until its client leaves, so whatever P's leg ends with but KV must end D's leg at
// once, with a new id for the next try (docs/protocols/nixl-push.md, recordings 04, 06).
func TestPushLeavesNoDecodeWaiting(t *testing.T) {
	t.Parallel()
	for rule, c := range map[string]struct {
		fault  enginesim.Fault
		status int
	}{
		"P refuses its leg": {
			enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusBadRequest, Leg: enginesim.LegPrefill},
			http.StatusBadRequest,
		},
		"P fails": {
			enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusInternalServerError,
				Leg: enginesim.LegPrefill}, http.StatusBadGateway,
		},
		"P's response holds no handoff": {
			enginesim.Fault{Kind: enginesim.FaultGarbage, Body: `{"id":"x","kv_transfer_params":null}`,
				Leg: enginesim.LegPrefill}, http.StatusBadGateway,
		},
		"P breaks the connection": {enginesim.Fault{Kind: enginesim.FaultReset, Leg: enginesim.LegPrefill},
			http.StatusBadGateway},
		"P is another engine than its id": {
			enginesim.Fault{Kind: enginesim.FaultGarbage, Body: anothersResponse, Leg: enginesim.LegPrefill},
			http.StatusBadGateway,
		},
		"D fails: nothing is left waiting": {
			enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusInternalServerError,
				Leg: enginesim.LegDecode}, http.StatusInternalServerError,
		},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			push := protocols[slices.IndexFunc(protocols, func(p protocol) bool {
				return p.title() == "nixl-push/together"
			})]
			x := push.start(t)
			for _, e := range []*enginesim.Engine{x.p, x.d} {
				e.Inject(c.fault)
			}
			begun := time.Now()
			status, _, response := x.gateway.complete(body(connector.APICompletions, 1, false))
			assert.Equal(t, c.status, status, response)
			assert.Less(t, time.Since(begun), 15*time.Second)
			ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
			defer cancel()
			require.NoError(t, x.d.WaitIdle(ctx), "D still waits")

			request := body(connector.APICompletions, 2, false)
			status, _, response = x.gateway.complete(request)
			require.Equal(t, http.StatusOK, status, "%s\n%s", response, x.gateway.log)
			_, _, want := do(t, http.MethodPost, x.alone.URL()+"/v1/completions", request)
			assert.Equal(t, texts(t, want), texts(t, response))
		})
	}
}

// anothersResponse is well formed, but not for the request that gets it.
const anothersResponse = `{"id":"x","kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,` +
	`"remote_block_ids":[[1]],"remote_engine_id":"another",` +
	`"remote_request_id":"cmpl-1-0-8f6419b6","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,` +
	`"remote_num_tokens":1,"transfer_mode":"push"}}`
