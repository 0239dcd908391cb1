// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What engines count of KV is added up over their ranks.
func TestKVIsCounted(t *testing.T) {
	for name, c := range map[string]struct {
		page string
		want KV
	}{
		"vLLM with NIXL": {
			`vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 96
vllm:prompt_tokens_by_source_total{engine="1",source="external_kv_transfer"} 4
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 7
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 1000
vllm:nixl_bytes_transferred_sum{engine="0"} 4.096e+12
vllm:nixl_bytes_transferred_count{engine="0"} 3
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.25
vllm:nixl_num_failed_transfers_total{engine="0"} 2
vllm:nixl_num_kv_expired_reqs_total{engine="0"} 1
vllm:generation_tokens_total{engine="0"} 5
vllm:generation_tokens_total{engine="1"} 6
vllm:request_success_total{engine="0",finished_reason="stop"} 2
vllm:request_success_total{engine="0",finished_reason="length"} 3
`, KV{Taken: 100, Computed: 7, Generated: 11, Requests: 5, Bytes: 4.096e12, Seconds: 0.25, Failed: 2, Expired: 1},
		},
		"SGLang": {
			`sglang:token_usage{tp_rank="0"} 0.1
sglang:kv_transfer_total_mb_sum{tp_rank="0"} 1.5
sglang:kv_transfer_total_mb_sum{tp_rank="1"} 1.5
sglang:kv_transfer_latency_ms_sum{tp_rank="0"} 20
sglang:realtime_tokens_total{mode="prefill_compute"} 12
sglang:realtime_tokens_total{mode="decode"} 40
sglang:num_requests_total{tp_rank="0"} 3
`, KV{Computed: 12, Generated: 40, Requests: 3, Bytes: 1.5 * (1 << 20), Seconds: 0.02},
		},
		"LMCache in vLLM": {
			`vllm:num_requests_running 0
lmcache:local_cache_usage{worker_id="0"} 3e9
lmcache:local_cache_usage{worker_id="1"} 1e9
lmcache:local_storage_usage{worker_id="0"} 5e9
`, KV{Memory: 4e9, Disk: 5e9},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := parseMetrics(strings.NewReader(c.page))
			require.NoError(t, err)
			assert.True(t, m.load)
			assert.InDelta(t, c.want.Seconds, m.kv.Seconds, 1e-9)
			m.kv.Seconds = c.want.Seconds
			assert.Equal(t, c.want, m.kv)
		})
	}
}
