// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

const secret = "sk-of-engines"

// keyFile writes the file that -engine-key-file names, with a key.
func keyFile(t *testing.T, key string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(path, []byte(key+"\n"), 0o600))
	return path
}

// asksFor completes a prompt of a model with a client's key, and returns the status.
func (p *program) asksFor(model, key string, turn int) int {
	p.t.Helper()
	var header []string
	if key != "" {
		header = []string{"Authorization", "Bearer " + key}
	}
	status, _, _ := p.complete(fmt.Sprintf(`{"model":%q,"prompt":"hello %d","max_tokens":4}`, model, turn), header...)
	return status
}

// vLLM with --api-key guards /v1: vllm-project/production-stack#150, llm-d/llm-d-router#2671.
func TestWhatTheGatewayAsksEnginesHasItsKey(t *testing.T) {
	t.Parallel()
	engines := publishers(t, 2, func(c *enginesim.Config) { c.APIKey, c.Adapters = secret, []string{"lora"} })
	g := start(t, gatewayYAML("")+simYAML(followed+"  decision: {mode: predicted}\n"+
		"  attestation: {mode: report, every: 50ms}\n", engines...),
		"-pick", "kv", "-inspect", "100ms", "-synthetic-probe", "100ms", "-engine-key-file", keyFile(t, secret))
	g.exact(4)
	eventually(t, func() bool { return g.asksFor("lora", secret, 0) == http.StatusOK }, "adapters are listed")
	for i := range 8 {
		require.Equal(t, http.StatusOK, g.asksFor("tiny", secret, i))
		require.Equal(t, http.StatusUnauthorized, g.asksFor("tiny", "", i), "the gateway's key is not the client's")
	}
	rendered := 0
	for _, e := range engines {
		rendered += posted(e, "/v1/completions/render")
	}
	assert.GreaterOrEqual(t, rendered, 8)
	g.shows(`pd_attest_probes_total{gen_ai_request_model="tiny",pd_verdict="right"}`)
	g.shows(`pd_reuse_checks_total{gen_ai_request_model="tiny",pd_connector="nixl",pd_verdict="reused"}`)
	assert.NotContains(t, g.page("/debug/pd")+g.log.String()+g.page("/metrics"), secret)
	assert.NotContains(t, g.log.String(), "key")
}

// SGLang with --api-key guards all but health and metrics, and so what it says of itself: sgl-project/sglang#30046.
func TestWhatTheGatewayAsksSGLangHasItsKey(t *testing.T) {
	t.Parallel()
	launched := enginesim.Config{APIKey: secret, Connector: "sglang", Adapters: []string{"lora"}}
	p, d := simPair(t, launched, launched)
	yaml := gatewayYAML("") + serverYAML("tiny", "  kvConnector: {type: sglang}\n", as("prefill", p), as("decode", d))
	g := start(t, yaml, "-inspect", "100ms", "-engine-key-file", keyFile(t, secret))
	// the entry does not say at which port P's bootstrap server listens: P's /server_info does
	eventually(t, func() bool { return g.asksFor("lora", secret, 0) == http.StatusOK })
	assert.Equal(t, http.StatusUnauthorized, g.asksFor("tiny", "", 1))
}

func TestTheLogSaysOnceThatEnginesWantAKey(t *testing.T) {
	t.Parallel()
	for _, connector := range []string{"nixl", "sglang"} {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			c := enginesim.Config{APIKey: secret, Connector: connector}
			p, d := simPair(t, c, c)
			bootstrap, _ := bootstrapPort(p, d)
			g := start(t, gatewayYAML("")+serverYAML("tiny", "  kvConnector: {type: "+connector+"}\n",
				entry(p.URL(), "prefill", bootstrap), as("decode", d)), "-inspect", "20ms")
			g.logs(1, `engines want a key for what the gateway asks them: start the gateway with -engine-key-file" `+
				"model=tiny path=/v1/models status=401")
			time.Sleep(200 * time.Millisecond)
			assert.Equal(t, 1, strings.Count(g.log.String(), "-engine-key-file"), g.log)
			assert.Equal(t, http.StatusOK, g.asksFor("tiny", secret, 1), "clients with a key are served")
		})
	}
}

func TestAKeyThatChangesIsReadAgain(t *testing.T) {
	t.Parallel()
	c := enginesim.Config{APIKey: secret, Adapters: []string{"lora"}}
	p, d := simPair(t, c, c)
	path := keyFile(t, "old")
	g := start(t, gatewayYAML("")+simYAML("", p, d), "-inspect", "50ms", "-engine-key-file", path)
	g.logs(1, "engines refuse the key of -engine-key-file")
	require.NoError(t, os.WriteFile(path, []byte(secret), 0o600))
	eventually(t, func() bool { return g.asksFor("lora", secret, 0) == http.StatusOK })
	assert.NotContains(t, g.log.String(), secret)
}

func TestAKeyFileThatHasNoKeyEndsTheStart(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "two keys"} {
		file := keyFile(t, key)
		g := prepare(t, gatewayYAML("")+serverYAML("m", "", entry("http://127.0.0.1:1", "both", nil)), "-check",
			"-engine-key-file", file)
		code := run(append([]string{"-config", g.file}, g.args...), g.log, g.log, g.signals)
		assert.Equal(t, exitWrong, code)
		assert.Contains(t, g.log.String(), file)
		assert.NotContains(t, g.log.String(), "two keys")
	}
}
