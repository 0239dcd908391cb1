// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// Two pairs whose engines were launched with contexts of different lengths (--max-model-len, in SemiAnalysisAI's
// InferenceX issue 2257 by mistake). The gateway reads the lengths and sends what is too long for one pair to the other:
// at once where it knows the tokens, else when an engine has refused.
func TestRequestsGoWhereTheContextHasRoom(t *testing.T) {
	var entries []string
	var short []*enginesim.Engine
	for _, length := range []int{512, 4096} {
		launched := enginesim.Config{MaxModelLen: length}
		p, d, err := enginesim.Pair(launched, launched)
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
		entries = append(entries, entry(p.URL(), "prefill", nil), entry(d.URL(), "decode", nil))
		if length == 512 {
			short = []*enginesim.Engine{p, d}
		}
	}
	g := start(t, gatewayYAML("")+serverYAML("tiny", "  kvConnector: {type: nixl}\n", entries...))
	ids := func(n int) string { return "[" + strings.Repeat("7,", n-1) + "7]" }
	served := func(body string) [2]int64 { // how many of 20 the short engines get
		p, d := short[0].Stats().Requests, short[1].Stats().Requests
		for range 20 {
			g.complete(body)
		}
		return [2]int64{short[0].Stats().Requests - p, short[1].Stats().Requests - d}
	}
	eventually(t, func() bool {
		all := served(`{"model":"tiny","prompt":"hi","max_tokens":4}`)
		some := served(`{"model":"tiny","prompt":` + ids(1000) + `,"max_tokens":4}`)
		return all[0] > 0 && all[1] > 0 && some == [2]int64{} &&
			served(`{"model":"tiny","prompt":"hi","max_tokens":1000}`)[1] == 0
	}, "all engines are ready, and their lengths are known")
	for name, k := range map[string]struct {
		body  string
		known bool // P needs room for it, and that is known before anything is sent
	}{
		"token ids": {`{"model":"tiny","prompt":` + ids(1000) + `,"max_tokens":4}`, true},
		"a limit":   {`{"model":"tiny","prompt":"hi","max_tokens":1000}`, false},
		"a text":    {fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4}`, strings.Repeat("long ", 200)), false},
	} {
		p, d := short[0].Stats().Requests, short[1].Stats().Requests
		for range 10 {
			status, _, response := g.complete(k.body)
			require.Equal(t, http.StatusOK, status, "%s: %s", name, response)
		}
		assert.Equal(t, d, short[1].Stats().Requests, name)
		if k.known {
			assert.Equal(t, p, short[0].Stats().Requests, name)
		}
	}
	status, _, _ := g.complete(`{"model":"tiny","prompt":` + ids(5000) + `,"max_tokens":4}`)
	assert.Equal(t, http.StatusBadRequest, status, "too long for all")
}
