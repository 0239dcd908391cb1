// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

// podsOf is an API server that lists these pods and never changes them. It returns a kubeconfig for it.
func podsOf(t *testing.T, pods ...string) (kubeconfig string) {
	t.Helper()
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch q := r.URL.Query(); {
		case q.Get("sendInitialEvents") != "": // it cannot stream its first list
			w.WriteHeader(http.StatusUnprocessableEntity)
			fmt.Fprint(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Invalid","code":422}`)
		case q.Get("watch") != "":
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		default:
			fmt.Fprintf(w, `{"apiVersion":"v1","kind":"PodList","metadata":{"resourceVersion":"1"},"items":[%s]}`,
				strings.Join(pods, ","))
		}
	}))
	t.Cleanup(func() { api.CloseClientConnections(); api.Close() })
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(kubeconfig, fmt.Appendf(nil, "apiVersion: v1\nkind: Config\ncurrent-context: c\n"+
		"clusters: [{name: c, cluster: {server: %q}}]\nusers: [{name: u}]\n"+
		"contexts: [{name: c, context: {cluster: c, user: u}}]\n", api.URL), 0o600))
	return kubeconfig
}

func podJSON(name, ip, labels, annotations string) string {
	return fmt.Sprintf(`{"metadata":{"name":%q,"uid":%q,"labels":{"app":"llm",%s},"annotations":{%s}},"status":{`+
		`"phase":"Running","podIP":%q,"conditions":[{"type":"Ready","status":"True"}]}}`, name, name, labels,
		annotations, ip)
}

// Two pods of a LeaderWorkerSet have two ranks each, with a port for each rank. The gateway serves with each rank, and
// decode takes the KV from the rank that has it.
func TestEachPortOfAPodIsAnEngine(t *testing.T) {
	port, err := freeport.Find(2)
	require.NoError(t, err)
	side, err := freeport.Find(4)
	require.NoError(t, err)
	cfg := enginesim.Config{Connector: "offload-p2p", KVRole: enginesim.RoleProducer}
	var engines []*enginesim.Engine
	var pods []string
	for i := range 2 {
		ip := fmt.Sprintf("127.0.0.%d", 2+i)
		cfg.Listen, cfg.SideChannel = ip+":"+strconv.Itoa(port), ip+":"+strconv.Itoa(side)
		ranks, err := enginesim.StartRanks(cfg, 2*i, 2)
		require.NoError(t, err)
		engines = append(engines, ranks...)
		pods = append(pods, podJSON(fmt.Sprintf("p-%d", i), ip, `"role":"prefill",`+
			fmt.Sprintf(`"leaderworkerset.sigs.k8s.io/worker-index":"%d"`, i), ""))
	}
	cfg.KVRole, cfg.Listen, cfg.SideChannel = enginesim.RoleConsumer, "127.0.0.4:"+strconv.Itoa(port), ""
	decode, err := enginesim.Start(cfg)
	require.NoError(t, err)
	pods = append(pods, podJSON("d", "127.0.0.4", `"role":"decode"`, fmt.Sprintf(`"pdkit.dev/ports":"%d"`, port)))
	t.Cleanup(func() {
		for _, e := range append(engines, decode) {
			assert.NoError(t, e.Close())
		}
	})

	file := gatewayYAML("") + fmt.Sprintf(`apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
spec:
  model: tiny
  workloadSelector: {matchLabels: {app: llm}, pdGroup: {prefillLabels: {role: prefill}, decodeLabels: {role: decode}}}
  kvConnector: {type: offload-p2p, config: {port: %d}}
  discovery: {kubernetes: {kubeconfig: %q, namespace: llm, ports: [%d-%d]}}
`, side, podsOf(t, pods...), port, port+1)
	path := filepath.Join(t.TempDir(), "gateway.yaml")
	require.NoError(t, os.WriteFile(path, []byte(file), 0o600))
	code, stdout, stderr := check(t, "-config", path)
	require.Equal(t, exitOK, code, stderr)
	assert.Contains(t, stdout, fmt.Sprintf("pods of namespace llm, app=llm, ports %d-%d", port, port+1))

	g := start(t, file)
	g.knows(5)
	var ids []string
	for _, e := range g.debug().Models[0].Endpoints {
		ids = append(ids, e.ID)
	}
	at := func(pod string, rank int) string { return fmt.Sprintf("llm/%s:%d", pod, port+rank) }
	assert.ElementsMatch(t, []string{at("d", 0), at("p-0", 0), at("p-0", 1), at("p-1", 0), at("p-1", 1)}, ids)
	const requests = 8
	began := time.Now()
	for i := range requests {
		status, _, body := do(t, http.MethodPost, g.client+"/v1/completions",
			fmt.Sprintf(`{"model":"tiny","prompt":"%s","max_tokens":4}`, strings.Repeat(string(rune('a'+i)), 96)))
		require.Equal(t, http.StatusOK, status, body)
	}
	assert.EqualValues(t, requests*96, decode.Stats().ExternalKVTransfer, "after %v", time.Since(began))
	for i, e := range engines {
		assert.EqualValues(t, requests/len(engines), e.Stats().Requests, "rank %d", i)
		assert.NoError(t, e.CheckKV())
	}
	assert.NoError(t, decode.CheckKV())
}
