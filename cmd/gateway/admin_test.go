// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A page in an operator's browser may let its own name resolve to the gateway. It reads no engine's URL then.
func TestDebugAnswersNoForeignHost(t *testing.T) {
	g, _, _ := startHTTP(t, "", "")
	for path, want := range map[string]int{"/debug/pd": http.StatusForbidden, "/metrics": 200, "/readyz": 200} {
		assert.Equal(t, want, statusFor(t, "rebound.example:9000", g.admin+path), path)
	}
	status, _, _ := do(t, http.MethodGet, g.admin+"/debug/pd", "")
	assert.Equal(t, http.StatusOK, status)
}

// Profiles are behind a flag, and behind the same check of the host as /debug/pd.
func TestProfilesAreServedWhereAFlagSaysSo(t *testing.T) {
	t.Parallel()
	p, d := newEngine(t), newEngine(t)
	for _, on := range []bool{false, true} {
		var args []string
		want, foreign := http.StatusNotFound, http.StatusNotFound
		if on {
			args, want, foreign = []string{"-pprof"}, http.StatusOK, http.StatusForbidden
		}
		g := start(t, gatewayYAML("")+pairYAML("m", p, d, ""), args...)
		for _, path := range []string{"", "heap", "goroutine?debug=1", "cmdline", "symbol", "profile?seconds=1",
			"trace?seconds=0.01"} {
			path = "/debug/pprof/" + path
			status, _, _ := do(t, http.MethodGet, g.admin+path, "")
			assert.Equal(t, want, status, path)
			assert.Equal(t, foreign, statusFor(t, "rebound.example:9000", g.admin+path), path)
			status, _, _ = do(t, http.MethodGet, g.client+path, "")
			assert.Equal(t, http.StatusNotFound, status, "clients never get %s", path)
		}
	}
}

// statusFor asks under a name of the server.
func statusFor(t *testing.T, host, url string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	r.Host, r.Close = host, true
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	_ = resp.Body.Close()
	return resp.StatusCode
}

func TestHostsThatMayAskForDebug(t *testing.T) {
	for _, c := range []struct {
		admin, host string
		want        bool
	}{
		{"127.0.0.1:9000", "127.0.0.1:9000", true},
		{"127.0.0.1:9000", "127.0.0.1", true},
		{"[::1]:9000", "[::1]:9000", true},
		{":9000", "[fd00::7]", true},
		{":9000", "10.0.0.7:9000", true},
		{":9000", "LocalHost:1234", true},
		{":9000", "pd.localhost.:9000", true},
		{"gateway.internal:9000", "Gateway.internal:80", true},
		{"gateway.internal:9000", "internal:9000", false},
		{":9000", "gateway:9000", false},
		{":9000", "127.0.0.1.rebound.example", false},
		{":9000", "localhost.rebound.example", false},
		{":9000", "notlocalhost", false},
		{":9000", "", false},
		{":9000", ":9000", false},
	} {
		cfg := &configuration{}
		cfg.gateway.Admin = c.admin
		r := httptest.NewRequest(http.MethodGet, "/debug/pd", nil)
		r.Host = c.host
		g := &gateway{}
		g.cfg.Store(cfg)
		assert.Equal(t, c.want, g.debugs(r), "%q at %q", c.host, c.admin)
	}
}
