// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

const fieldBody = `{"model":"m","prompt":"a b c","max_tokens":4,"stream":true}`

// vLLM 0.32.0 guards four prefixes, SGLang 0.5.23 all but three.
func TestAnAPIKeyGuardsWhatTheEnginesGuard(t *testing.T) {
	for connector, free := range map[string][]string{
		"nixl":   {"/health", "/metrics", "/version", "/kv_event_sources", "/tokenize"},
		"sglang": {"/health", "/health_generate", "/metrics"},
	} {
		e, err := enginesim.Start(enginesim.Config{Connector: connector, APIKey: "k"})
		require.NoError(t, err)
		defer e.Close()
		for _, path := range []string{"/health", "/health_generate", "/metrics", "/version", "/kv_event_sources",
			"/tokenize", "/server_info", "/v1/models", "/v1/completions", "/inference/v1/generate"} {
			for _, authorization := range []string{"", "Bearer x", "k", "bearer k"} {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, e.URL()+path, http.NoBody)
				require.NoError(t, err)
				r.Header.Set("Authorization", authorization)
				resp, err := http.DefaultClient.Do(r)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				guarded := connector == "sglang" || strings.HasPrefix(path, "/v1") || path[1] == 'i'
				refused := guarded && !slices.Contains(free, path) && authorization != "bearer k"
				assert.Equal(t, refused, resp.StatusCode == http.StatusUnauthorized, "%s %s %q", connector, path,
					authorization)
			}
		}
	}
}

// Connections, not requests, are spread over the processes behind a port: who keeps one connection meets one process.
func TestAConnectionBelongsToOneOfTheAPIServers(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{Model: "m", APIServers: 4})
	require.NoError(t, err)
	defer e.Close()
	ask := func(c *http.Client) {
		resp, err := c.Post(e.URL()+"/v1/completions", "application/json", strings.NewReader(fieldBody))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
	}
	processes := func() map[int]bool {
		met := map[int]bool{}
		for _, r := range e.Requests() {
			met[r.Process] = true
		}
		return met
	}
	kept := &http.Client{Transport: &http.Transport{}}
	defer kept.CloseIdleConnections()
	for range 10 {
		ask(kept)
	}
	assert.Len(t, processes(), 1)
	for range 40 { // by chance one of four is missing in one run of 25,000
		ask(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}})
	}
	assert.Len(t, processes(), 4)
}

// A stream may be silent for a while and go on, as that of an engine whose tool parser waits for the end of a call.
func TestAStreamGoesOnAfterItsSilence(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{Model: "m"})
	require.NoError(t, err)
	defer e.Close()
	for _, streamed := range []string{"true", "false"} {
		e.Inject(enginesim.Fault{Kind: enginesim.FaultStallStream, AfterChunks: 2, Delay: 300 * time.Millisecond})
		began := time.Now()
		resp, err := http.Post(e.URL()+"/v1/completions", "application/json",
			strings.NewReader(strings.Replace(fieldBody, "true", streamed, 1)))
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.GreaterOrEqual(t, time.Since(began), 300*time.Millisecond)
		assert.Contains(t, string(body), `"finish_reason":"length"`)
	}
}

func TestASurplusResponseFollowsOnTheSameConnection(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{Model: "m"})
	require.NoError(t, err)
	defer e.Close()
	e.Inject(enginesim.Fault{Kind: enginesim.FaultSurplus, Delay: 100 * time.Millisecond, Body: `{"surplus":true}`})
	resp := rawPost(t, e, fieldBody)
	first, err := http.ReadResponse(resp, nil)
	require.NoError(t, err)
	body, err := io.ReadAll(first.Body)
	require.NoError(t, err)
	require.NoError(t, first.Body.Close())
	assert.Contains(t, string(body), "[DONE]")
	second, err := http.ReadResponse(resp, nil)
	require.NoError(t, err)
	body, err = io.ReadAll(second.Body)
	require.NoError(t, err)
	require.NoError(t, second.Body.Close())
	assert.JSONEq(t, `{"surplus":true}`, string(body))
}

// rawPost sends a completion on a connection of its own, from which it returns what comes.
func rawPost(t *testing.T, e *enginesim.Engine, body string) *bufio.Reader {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(e.URL(), "http://"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	_, err = fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\n\r\n%s", len(body), body)
	require.NoError(t, err)
	return bufio.NewReader(conn)
}
