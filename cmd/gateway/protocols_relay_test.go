// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

func relayProtocols() (rows []protocol) {
	relayed := map[string]broken{"D without a connector": loneD, "P without a connector": loneP}
	rows = append(rows,
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
		rows = append(rows, protocol{
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
	return rows
}

// What a client writes in the member that relay uses never reaches an engine, whether two engines serve the request or
// one, and whether P's parameters come in a member or in a header.
func TestAClientsOwnRelayedMemberReachesNoEngine(t *testing.T) {
	for name, m := range map[string]struct{ config, want string }{
		"a member":                    {`{member: sampling_params.ticket}`, `"ticket":{"t":17}`},
		"from a header into a member": {`{header: X-KV-Ticket, member: sampling_params.ticket}`, `"ticket":"t-17"`},
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			seen := map[string][]string{}
			engine := func(role string) string {
				s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					body, _ := io.ReadAll(r.Body)
					if r.Method == http.MethodPost {
						mu.Lock()
						seen[role] = append(seen[role], string(body))
						mu.Unlock()
					}
					w.Header().Set("Content-Type", "application/json")
					w.Header().Set("X-KV-Ticket", "t-17")
					_, _ = io.WriteString(w, `{"choices":[],"sampling_params":{"ticket":{"t":17}}}`)
				}))
				t.Cleanup(s.Close)
				return s.URL
			}
			g := start(t, gatewayYAML("")+serverYAML("tiny", "  kvConnector: {type: relay, config: "+m.config+"}\n",
				entry(engine("prefill"), "prefill", nil), entry(engine("decode"), "decode", nil)))
			send := func(more string) string {
				status, h, got := g.complete(
					`{"model":"tiny","prompt":"x","max_tokens":3,"sampling_params":{"ticket":"mine"}` + more + `}`)
				require.Equal(t, http.StatusOK, status, got)
				return h.Get("X-PD-Mode")
			}
			assert.Equal(t, "disaggregated", send(""))
			assert.Equal(t, "aggregated", send(`,"n":2`))
			mu.Lock()
			defer mu.Unlock()
			require.Len(t, seen["prefill"], 1)
			require.Len(t, seen["decode"], 2)
			assert.Contains(t, seen["decode"][0], m.want)
			assert.NotContains(t, seen["decode"][1], "ticket")
			assert.NotContains(t, fmt.Sprint(seen), "mine")
		})
	}
}
