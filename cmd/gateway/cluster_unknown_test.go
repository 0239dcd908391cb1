// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Until the cluster has sent its list, nobody knows whether a model is served: clients are to try again. Models of the
// file are served meanwhile, but for the one of any name, in place of which the cluster may have another.
func TestModelsBeforeTheClustersFirstList(t *testing.T) {
	t.Parallel()
	answers := make(chan struct{})
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-answers:
		case <-r.Context().Done():
			return
		}
		if r.URL.Query().Get("watch") != "" {
			<-r.Context().Done()
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"kind":"ModelServerList","apiVersion":"networking.matrixinfer.ai/v1alpha1",`+
			`"metadata":{"resourceVersion":"1"},"items":[]}`)
	}))
	t.Cleanup(func() { api.CloseClientConnections(); api.Close() })
	file := filepath.Join(t.TempDir(), "kubeconfig")
	require.NoError(t, os.WriteFile(file, []byte(`apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "`+api.URL+`"}}]
users: [{name: u, user: {}}]
`), 0o600))
	p, d := newEngine(t, "m"), newEngine(t, "m")
	cluster := gatewayYAML(fmt.Sprintf(passing+", modelServers: {kubeconfig: %q}", file))
	alone, beside := start(t, cluster), start(t, cluster+pairYAML("m", p, d, "")+pairYAML("*", p, d, ""))
	ask := func(g *program, path, model string) (int, string) {
		status, h, body := do(t, http.MethodPost, g.client+path, `{"model":"`+model+`","prompt":"x"}`)
		if status == http.StatusServiceUnavailable {
			assert.Equal(t, "1", h.Get("Retry-After"))
			assert.NotEmpty(t, h.Get("X-Request-Id"))
		}
		return status, body
	}
	for _, path := range []string{"/v1/completions", "/v1/messages", "/tokenize"} {
		for _, g := range []*program{alone, beside} {
			status, body := ask(g, path, "other")
			assert.Equal(t, http.StatusServiceUnavailable, status, path)
			assert.Contains(t, body, "the models are not known yet", path)
		}
	}
	status, _ := ask(beside, "/v1/completions", "m")
	assert.Equal(t, http.StatusOK, status)
	status, _, body := do(t, http.MethodGet, alone.client+modelsPath, "")
	assert.Equal(t, http.StatusServiceUnavailable, status, "an empty list would say that there are none")
	assert.Contains(t, body, `"code":"no_endpoint"`)
	_, _, body = do(t, http.MethodGet, beside.client+modelsPath, "")
	assert.Contains(t, body, `"id":"m"`)

	close(answers)
	require.Eventually(t, func() bool {
		status, _ := ask(alone, "/v1/completions", "other")
		return status == http.StatusNotFound
	}, 20*time.Second, 10*time.Millisecond)
	require.Eventually(t, func() bool {
		status, _ := ask(beside, "/v1/completions", "other")
		return status == http.StatusOK
	}, 20*time.Second, 10*time.Millisecond)
	status, _ = ask(alone, "/tokenize", "other")
	assert.Equal(t, http.StatusNotFound, status)
	status, _, _ = do(t, http.MethodGet, alone.client+modelsPath, "")
	assert.Equal(t, http.StatusOK, status)
}
