// SPDX-License-Identifier: Apache-2.0

package verdict_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/verdict"
)

func known(host string) bool { return host == "prefill-0" }

func TestAnErrorTellsNoAddress(t *testing.T) {
	for said, want := range map[string]string{
		"cannot fetch http://10.0.0.7:8100/v1?a=b, giving up": "cannot fetch (address) giving up",
		"see https://[fd00::1]:80/x":                          "see (address)",
		"tcp://decode-1:5600 is down":                         "(address) is down",
		"Connect call failed ('10.0.0.7', 8100)":              "Connect call failed ('(address)', 8100)",
		"peer 10.0.0.7:5600.":                                 "peer (address).",
		"id cmpl-___prefill_addr_10.0.0.7:20001___decode_addr_10.0.0.8:20002_a": "id cmpl-___prefill_addr_(address)" +
			"___decode_addr_(address)_a",
		"peer fd00::1: refused":                          "peer (address): refused",
		"peer [fd00::1]:5600 refused":                    "peer (address) refused",
		"peer fe80::1%eth0 refused":                      "peer (address) refused",
		"Cannot connect to host decode-1:8100 ssl:80":    "Cannot connect to host (address) ssl:80",
		"face:8100: refused":                             "(address): refused",
		"HTTPConnectionPool(host='decode-1', port=8100)": "HTTPConnectionPool(host='(address)', port=8100)",
		"no route to p.ns.svc.cluster.local.":            "no route to (address).",
		"ip-10-0-0-7.ec2.internal, localhost":            "(address), (address)",
		"Prefill-0 (prefill-01) refused":                 "(address) (prefill-01) refused",
	} {
		body, err := json.Marshal(map[string]any{"error": map[string]any{"message": said}})
		require.NoError(t, err)
		assert.Equal(t, want, verdict.FaultOf(body, known).Message)
	}
	for _, said := range []string{
		"This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
		"sampling_params.max_tokens: must be at least 1, got -1.", "messages.0.content: Field required",
		"torch.cuda.OutOfMemoryError on cuda:10 with vllm 0.32.0", "the model `meta-llama/Llama-3.1-8B` does not exist",
		"at 2026-11-22T12:30:45, max_tokens:16384", "[{'type': 'missing', 'loc': ('body', 'messages')}]",
		"std::bad_alloc, e.g. 7", "host memory is full",
	} {
		body, err := json.Marshal(map[string]any{"error": map[string]any{"message": said}})
		require.NoError(t, err)
		assert.Equal(t, said, verdict.FaultOf(body, known).Message)
	}
}

func TestFaultsOfEngines(t *testing.T) {
	for body, want := range map[string]*verdict.Fault{
		`{"error":{"message":"m","type":"t","param":"p","code":400,"peer":"h"},"trace":"x"}`: {Message: "m", Type: "t",
			Param: "p", Code: 400.0},
		`{"object":"error","message":"m","type":"t","param":null,"code":"c"}`: {Message: "m", Type: "t", Code: "c"},
		`{"error":"no room at http://h"}`:                                     {Message: "no room at (address)"},
		`{"type":"error","error":{"type":"t at http://h","message":"m"}}`: {Message: "m", Type: "t at (address)",
			Anthropic: true},
		`{"type":"error","message":"m","code":null}`:               {Message: "m", Type: "error"},
		`{"error":{"message":"m","param":["http://h"],"type":{}}}`: {Message: "m"},
		`{"detail":"http://h"}`:                                    nil,
		`{"error":{"message":7}}`:                                  nil,
		`["error"]`:                                                nil,
		`{"error":`:                                                nil,
		``:                                                         nil,
	} {
		assert.Equal(t, want, verdict.FaultOf([]byte(body), known), body)
	}
}
