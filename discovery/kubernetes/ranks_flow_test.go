// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixlpush"
	"github.com/pdkit/pdkit/connector/offload"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// The prefill engine is a LeaderWorkerSet of two pods of two ranks. If decode is told the address of another rank than
// the one that computed the prompt, it computes the prompt itself (offload-p2p) or waits for ever (nixl-push).
func TestDecodeTakesTheKVOfEachRankOfEachPod(t *testing.T) {
	for _, c := range []struct {
		connector string
		perRank   bool // each rank has an HTTP port of its own
	}{{offload.Name, true}, {offload.Name, false}, {nixlpush.Name, true}} {
		t.Run(fmt.Sprintf("%s, a port for each rank: %v", c.connector, c.perRank), func(t *testing.T) {
			first, err := freeport.Find(2)
			require.NoError(t, err)
			base, err := freeport.Find(4)
			require.NoError(t, err)
			at := func(ip string, port int) string { return net.JoinHostPort(ip, strconv.Itoa(port)) }
			f := newFakeAPI(t)
			o := llmPods(f)
			o.Selector.PDGroup = byRole
			o.Attributes = map[string]string{"p2pPort": strconv.Itoa(base), "sideChannelPort": strconv.Itoa(base),
				"engineID": "e"}
			var prefill []*enginesim.Engine
			for pod := range 2 {
				ip := fmt.Sprintf("127.0.0.%d", 2+pod)
				cfg := enginesim.Config{Connector: c.connector, KVRole: enginesim.RoleProducer, EngineID: "e",
					Listen: at(ip, first), SideChannel: at(ip, base)}
				p := enginePod(named(fmt.Sprintf("set-0-%d", pod)), atIP(ip), ofGroup("0", pod))
				if c.perRank {
					o.Ports = []int{first, first + 1}
					ranks, err := enginesim.StartRanks(cfg, 2*pod, 2)
					require.NoError(t, err)
					prefill = append(prefill, ranks...)
				} else {
					o.Port = strconv.Itoa(first)
					annotated("pdkit.dev/dpSize", "4")(p)
					annotated("pdkit.dev/dpSizeLocal", "2")(p)
					cfg.Extra = map[string]string{"data_parallel_size_local": "2",
						"data_parallel_start_rank": strconv.Itoa(2 * pod)}
					e, err := enginesim.Start(cfg)
					require.NoError(t, err)
					prefill = append(prefill, e)
				}
				f.put(p)
			}
			decode, err := enginesim.Start(enginesim.Config{Connector: c.connector, KVRole: enginesim.RoleConsumer,
				Listen: at("127.0.0.4", first), SideChannel: at("127.0.0.4", base),
				Extra: map[string]string{"load_timeout": "5"}})
			require.NoError(t, err)
			f.put(enginePod(named("d"), atIP("127.0.0.4"), labelled("role", "decode"),
				annotated("pdkit.dev/ports", strconv.Itoa(first))))
			t.Cleanup(func() {
				for _, e := range append(prefill, decode) {
					assert.NoError(t, e.Close())
				}
			})

			source, err := New(&o)
			require.NoError(t, err)
			set := discovery.NewSet(source)
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error)
			go func() { done <- set.Run(ctx) }()
			t.Cleanup(func() { cancel(); <-done })
			require.NoError(t, set.WaitReady(t.Context(), func(s *discovery.Snapshot) bool {
				return len(s.Endpoints) == len(prefill)+1
			}))
			k := map[string]func() (connector.KVConnector, error){
				offload.Name:  func() (connector.KVConnector, error) { return offload.New(nil) },
				nixlpush.Name: func() (connector.KVConnector, error) { return nixlpush.New(nil) },
			}[c.connector]
			conn, err := k()
			require.NoError(t, err)
			flow, err := pdflow.New(conn, pick.New(set, pick.RoundRobin()))
			require.NoError(t, err)
			server := httptest.NewServer(flow)
			t.Cleanup(func() {
				server.Close()
				assert.NoError(t, flow.Shutdown(context.Background()))
			})

			const requests = 12
			client := &http.Client{Timeout: 20 * time.Second}
			defer client.CloseIdleConnections()
			for i := range requests {
				body := fmt.Sprintf(`{"prompt":"%s","max_tokens":4}`, strings.Repeat(string(rune('a'+i)), 96))
				resp, err := client.Post(server.URL+"/v1/completions", "application/json", strings.NewReader(body))
				require.NoError(t, err, "request %d", i)
				require.NoError(t, resp.Body.Close())
				require.Equal(t, http.StatusOK, resp.StatusCode)
			}
			assert.EqualValues(t, requests*96, decode.Stats().ExternalKVTransfer, "tokens")
			assert.NoError(t, decode.CheckKV())
			for i, e := range prefill {
				assert.EqualValues(t, requests/len(prefill), e.Stats().Requests, "requests of prefill engine %d", i)
				assert.NoError(t, e.CheckKV())
			}
		})
	}
}
