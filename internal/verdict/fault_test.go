// SPDX-License-Identifier: Apache-2.0

package verdict_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/verdict"
)

func known(name string) bool {
	return slices.Contains([]string{"prefill-0", "llm/prefill-1", "prefill_7", "p0", "dead::beef"}, name)
}

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
		// names of the set, and names that look like an engine's
		"no KV at llm/prefill-1, prefill_7 or P0":   "no KV at (address), (address) or (address)",
		"from llm/prefill-1:8100 of p0.":            "from (address) of (address).",
		"peer llm/prefill-1:8100 (prefill_7:81)":    "peer (address) ((address))",
		"Cannot connect to host_2:8100":             "Cannot connect to (address)",
		"compose_prefill_1:8100 refused":            "(address) refused",
		"open /opt/vllm/engine.py: no such file":    "open (address): no such file",
		`File "/home/a/site-packages/v.py", line 3`: `File "(address)", line 3`,
		"shm=/dev/shm/nixl.0.":                      "shm=(address).",
		// IPv6 without brackets
		"peer:fd00::1":                            "peer:(address)",
		"error:fd00::1:8100: refused":             "error:(address): refused",
		"peer fd00:0:0:0:0:0:0:1:8100 refused":    "peer (address) refused",
		"peer=2001:db8:1:2:3:4:5:6, 2001:db8::7.": "peer=(address), (address).",
		"at dead::beef or std::bad":               "at (address) or std::bad",
	} {
		body, err := json.Marshal(map[string]any{"error": map[string]any{"message": said}})
		require.NoError(t, err)
		assert.Equal(t, want, verdict.FaultOf(body, verdict.Private{Engine: known}).Message)
	}
	for _, said := range []string{
		"This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
		"sampling_params.max_tokens: must be at least 1, got -1.", "messages.0.content: Field required",
		"torch.cuda.OutOfMemoryError on cuda:10 with vllm 0.32.0", "the model `meta-llama/Llama-3.1-8B` does not exist",
		"at 2026-11-22T12:30:45, max_tokens:16384", "[{'type': 'missing', 'loc': ('body', 'messages')}]",
		"std::bad_alloc, e.g. 7", "host memory is full", "POST /v1/chat/completions: and/or 3/4 tokens/s",
		"/messages/0/content is wrong", "block_size_16:32", "a::b, c[1:2:3], 12:30:45:1",
	} {
		body, err := json.Marshal(map[string]any{"error": map[string]any{"message": said}})
		require.NoError(t, err)
		assert.Equal(t, said, verdict.FaultOf(body, verdict.Private{Engine: known}).Message)
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
		assert.Equal(t, want, verdict.FaultOf([]byte(body), verdict.Private{Engine: known}), body)
	}
}

// A hostile engine's text costs little time, whatever it looks like.
func TestALongTextIsCut(t *testing.T) {
	for _, part := range []string{"1:", "fd00::1:", "/a", "a_1:8100 ", "[", "é", "10.0.0.7 "} {
		body, err := json.Marshal(map[string]any{"error": strings.Repeat(part, 1<<20/len(part))})
		require.NoError(t, err)
		begun := time.Now()
		f := verdict.FaultOf(body, verdict.Private{Engine: known})
		assert.Less(t, time.Since(begun), 30*time.Second, part)
		assert.Less(t, len(f.Message), 1<<20, part)
		assert.True(t, strings.HasSuffix(f.Message, " …"), part)
	}
}
