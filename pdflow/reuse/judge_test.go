// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"context"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector"
)

// described is a connector of which only the name and what it says of itself matter.
type described struct {
	name            string
	store, pairOnly bool
}

func (c described) Traits() connector.Traits {
	return connector.Traits{Name: c.name, Handoff: connector.Handoff{ContentStore: c.store},
		Serving: connector.Serving{PairOnly: c.pairOnly}}
}
func (described) Prefill(context.Context, *connector.Session, *connector.Leg) error {
	return nil
}
func (described) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

func TestReasonsFollowTheEvidence(t *testing.T) {
	served := SyntheticProbe{Status: http.StatusOK, Mode: "disaggregated", PromptTokens: 600}
	reached := counts{promptTokens: 600}
	looked := counts{promptTokens: 600, computed: 600, asked: 600}
	for rule, c := range map[string]struct {
		conn    connector.KVConnector
		probe   SyntheticProbe
		p, d    counts
		chunk   int64
		verdict Verdict
		first   string // the likeliest reason
		also    []string
	}{
		"reused": {described{name: "nixl"}, with(served, 600), reached, counts{takenOver: 600},
			32, Reused, "", nil},
		"less than half": {described{name: "nixl"}, with(served, 299), reached,
			counts{takenOver: 299, asked: 600, promised: 600}, 32, Partly, "was promised KV and computed", nil},
		"half is enough": {described{name: "lmcache", store: true}, with(served, 300), reached,
			counts{takenOver: 300}, 32, Reused, "", nil},
		"P was passed by": {described{name: "nixl"}, served, counts{}, looked, 32, NotReused,
			"the synthetic probes did not reach them", nil},
		"D has no connector": {described{name: "nixl"}, served, reached, counts{promptTokens: 600}, 32,
			NotReused, "never asked its KV connector", nil},
		"store not shared": {described{name: "sharedstorage", store: true}, served, reached, looked, 32,
			NotReused, "the store is not shared", []string{"hash seeds differ"}},
		"LMCache's own": {described{name: "lmcache", store: true}, served, reached, looked, 32,
			NotReused, "the store is not shared", []string{"enable_pd", "settleTime"}},
		"shorter than LMCache's chunk": {described{name: "lmcache", store: true},
			SyntheticProbe{Status: 200, PromptTokens: 200}, counts{promptTokens: 200}, looked, 32, NotReused,
			"shorter than one block or chunk (256 tokens)", nil},
		"shorter than a block": {described{name: "sharedstorage", store: true},
			SyntheticProbe{Status: 200, PromptTokens: 20}, counts{promptTokens: 20}, looked, 32, NotReused,
			"shorter than one block or chunk (32 tokens)", nil},
		"no tier, or other names of keys": {described{name: "offload-p2p"}, served, reached, looked, 32, NotReused,
			"no secondary tier of type p2p, or knows another generation of key names", []string{"PYTHONHASHSEED"}},
		"nothing pushed": {described{name: "lmcache-pd"}, served, reached, looked, 32, NotReused,
			"nothing was pushed", nil},
		"members not seen": {described{name: "nixl"}, served, reached, looked, 32, NotReused,
			"did not see this protocol's transfer members", nil},
		"expired": {described{name: "nixl"}, served, counts{promptTokens: 600, expired: 1},
			looked, 32, NotReused, "the handoff expired", nil},
		"read late": {described{name: "nixl"}, with(served, 600),
			counts{promptTokens: 600, late: 1}, counts{takenOver: 600}, 32, Reused, "", nil},
		"transfers failed": {described{name: "nixl"}, served, reached,
			counts{asked: 600, promised: 600, failedReads: 2}, 32, NotReused, "2 failed transfers", nil},
		"an engine alone served": {described{name: "nixl"},
			SyntheticProbe{Status: 200, Mode: "aggregated", PromptTokens: 600}, reached, looked, 32, NotReused,
			"X-PD-Mode: aggregated", nil},
		"a notice lost": {described{name: "lmcache-pd"}, SyntheticProbe{Status: 504, Code: "timeout"},
			reached, counts{}, 32, Failed, "notice did not come", []string{"pd_skip_proxy_notification"}},
		"another timeout": {described{name: "mooncake"}, SyntheticProbe{Status: 504, Code: "timeout"},
			reached, counts{}, 32, Failed, "a phase ran out of time", nil},
		"an engine's own error": {described{name: "nixl"}, SyntheticProbe{Status: 418, Code: "teapot"},
			reached, counts{}, 32, Failed, "status 418", nil},
		"no name at all": {nil, served, reached, looked, 32, NotReused,
			"did not see this protocol's transfer members", nil},
		"engines that cannot serve alone": {described{name: "sglang", pairOnly: true}, with(served, 600), counts{},
			counts{}, 0, Reused, "", nil},
		"an engine of role both served": {described{name: "sglang", pairOnly: true},
			SyntheticProbe{Status: 200, Mode: "aggregated", PromptTokens: 600}, counts{}, counts{}, 0, NotReused,
			"X-PD-Mode: aggregated", nil},
		"legs that did not meet": {described{name: "sglang", pairOnly: true},
			SyntheticProbe{Status: 502, Code: "decode_failed"}, counts{sglangUnmet: 1}, counts{}, 0, Failed,
			"the decode engine failed", []string{"1 requests that no decode engine came for"}},
	} {
		t.Run(rule, func(t *testing.T) {
			r := &Report{Probes: []SyntheticProbe{c.probe}, PromptTokens: c.probe.PromptTokens, Reused: c.probe.Reused,
				metrics: c.chunk > 0, byResponse: c.chunk == 0, evidence: delta{c.p, c.d}}
			v := &verification{Target: Target{Connector: c.conn}, report: r, chunk: c.chunk}
			if c.conn != nil {
				r.Connector = c.conn.Traits().Name
			}
			r.judge(v)
			assert.Equal(t, c.verdict, r.Verdict)
			if c.first == "" {
				assert.Empty(t, r.Reasons)
				return
			}
			assert.Contains(t, r.Reasons[0].Text, c.first)
			for _, words := range c.also {
				assert.Contains(t, r.String(), words)
			}
		})
	}
}

func with(p SyntheticProbe, reused int64) SyntheticProbe {
	p.Reused = reused
	return p
}

func TestMetricsAreReadAsTheyAreWritten(t *testing.T) {
	pg := page{
		`vllm:prompt_tokens_total{engine="0",model_name="a } b"} 12.0`,
		`vllm:prompt_tokens_total{engine="1",model_name="m"} 1e+03 1700000000`,
		`vllm:prompt_tokens_total_created{engine="0"} 99`,
		`vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 7`,
		`vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 5`,
		`vllm:nixl_bytes_transferred_sum garbage`,
		`vllm:cache_config_info{block_size="32",mamba_block_size="8",num_gpu_blocks="4096"} 1.0`,
	}
	assert.EqualValues(t, 1012, pg.sum(promptTokens))
	assert.EqualValues(t, 7, pg.sum(takenOver))
	assert.EqualValues(t, 5, pg.sum(computed))
	assert.Zero(t, pg.sum(nixlBytes))
	assert.EqualValues(t, 32, pg.label("vllm:cache_config_info", "block_size"))
	assert.EqualValues(t, 8, pg.label("vllm:cache_config_info", "mamba_block_size"))
	assert.Zero(t, pg.label("vllm:cache_config_info", "nothing"))
	assert.True(t, pg.bySource())
	assert.False(t, pg[:3].bySource())
}
