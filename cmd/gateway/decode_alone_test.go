// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
)

// A request that two engines cannot carry goes to a decode engine of MoRI-IO if its release serves requests alone, as
// engineVersion tells; otherwise the gateway refuses it, since such an engine would give a wrong text or none.
func TestADecodeEngineOfMoRIIOServesAloneIfItsReleaseDoes(t *testing.T) {
	for name, k := range map[string]struct {
		config, spec, version, mode string
		status                      int
	}{
		"write, told":      {`{engineVersion: "0.32.0"}`, "", "0.32", "aggregated", http.StatusOK},
		"read, told":       {`{mode: read, engineVersion: "0.33.0"}`, "", "0.33", "aggregated", http.StatusOK},
		"read, older":      {`{mode: read, engineVersion: "0.32.0"}`, "", "0.32", "", http.StatusBadRequest},
		"write, not told":  {`{}`, "", "0.33", "", http.StatusBadRequest},
		"write, told 0.28": {`{engineVersion: "0.28.0"}`, "", "0.28", "", http.StatusBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			extra := map[string]string{"version": k.version}
			if strings.Contains(k.config, "read") {
				extra["read_mode"] = "true"
			}
			c := protocol{connector: "moriio", config: k.config, prefill: enginesim.Config{Extra: extra},
				decode: enginesim.Config{Extra: extra}, attributes: moriPorts}
			x := c.start(t)
			request := `{"model":"tiny","prompt":["one of two prompts","the other"],"max_tokens":9,"temperature":0}`
			status, h, got := x.gateway.complete(request)
			assert.Equal(t, k.status, status, "%s\n%s", got, x.gateway.log)
			assert.Equal(t, k.mode, h.Get("X-PD-Mode"))
			if status != http.StatusOK {
				assert.Zero(t, x.d.Stats().Requests, "D was not asked")
				return
			}
			_, _, want := do(t, http.MethodPost, x.alone.URL()+"/v1/completions", request)
			assert.Equal(t, gjson.Get(want, "choices.#.text").Raw, gjson.Get(got, "choices.#.text").Raw)
		})
	}
}

// With fallback: decode such a decode engine serves a request whose prefill engine is gone.
// testdata/faults/rollout.yaml has the other case, which is a fault of the configuration.
func TestADecodeEngineOfMoRIIOIsAFallback(t *testing.T) {
	c := protocol{connector: "moriio", config: `{engineVersion: "0.32.0"}, fallback: decode`, attributes: moriPorts,
		prefill: enginesim.Config{Listen: "127.0.0.1:" + unusedPort(t), SideChannel: "127.0.0.1:" + unusedPort(t)}}
	x := c.start(t)
	require.NoError(t, x.p.Close())
	request := body(connector.APICompletions, 951, false)
	status, h, got := x.gateway.complete(request)
	require.Equal(t, http.StatusOK, status, "%s\n%s", got, x.gateway.log)
	assert.Equal(t, "fallback", h.Get("X-PD-Mode"))
	_, _, want := do(t, http.MethodPost, x.alone.URL()+"/v1/completions", request)
	assert.Equal(t, texts(t, want), texts(t, got))
}
