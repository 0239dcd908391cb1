// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What a client can choose becomes no label: who sends many names of models, paths, methods, hosts, headers and members
// makes as many series as who sends one of each.
func TestClientsMakeNoMetricSeries(t *testing.T) {
	t.Parallel()
	g := start(t, gatewayYAML(", passthrough: decode")+pairYAML("m", newEngine(t, "m"), newEngine(t, "m"),
		"  admission: {mode: fixed, inFlightPerDecode: 4, queue: 4, priorityHeader: X-Priority}\n"))
	ask := func(i int) {
		name := fmt.Sprintf("n%d", i)
		for _, r := range []struct{ method, path, body string }{
			{"POST", "/v1/completions", `{"model":"` + name + `","prompt":"hi","user":"` + name + `"}`},
			{"POST", "/v1/completions", `{"model":"m","prompt":["a","` + name + `"]}`},
			{"POST", "/v1/completions", `{"model":"m","prompt":"hi","prompt_logprobs":1,"` + name + `":1}`},
			{"POST", "/v1/completions", `{"model":"m","prompt":"hi","kv_transfer_params":{"` + name + `":1}}`},
			{"POST", "/v1/completions", `{"` + name + `":1`},
			{"POST", "/v1/embeddings", `{"model":"m","input":"` + name + `"}`},
			{"GET", "/v1/" + name, ""}, {"M" + name, "/v1/completions", ""}, {"GET", "/v1/responses/" + name, ""},
		} {
			req, err := http.NewRequestWithContext(t.Context(), r.method, g.client+r.path, strings.NewReader(r.body))
			require.NoError(t, err)
			req.Host = name + ".example"
			for _, h := range []string{"X-Request-Id", "X-Session-Id", "X-Priority", "Authorization", "User-Agent",
				"Anthropic-Version", "Traceparent", "X-" + name} {
				req.Header.Set(h, name)
			}
			if req.Header.Set("Content-Type", "application/json"); i%2 == 1 {
				req.Header.Set("Content-Type", "application/"+name)
			}
			resp, err := http.DefaultClient.Do(req)
			require.NoError(t, err)
			_ = resp.Body.Close()
		}
	}
	series := func() (all []string) {
		for line := range strings.Lines(g.page("/metrics")) {
			if strings.HasPrefix(line, "pd_") {
				all = append(all, line[:strings.LastIndexByte(line, ' ')])
			}
		}
		return all
	}
	for i := range 4 {
		ask(i)
	}
	before := series()
	for i := range 60 {
		ask(100 + i)
	}
	after := series()
	assert.Subset(t, before, after)
	assert.NotContains(t, strings.Join(after, "\n"), "n10")
}
