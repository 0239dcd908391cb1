// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"strings"
	"testing"
	"time"

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

// Requests whose KV is on its way are told apart from those that wait for the engine. With priorities, SGLang gives
// each beside the sum of all.
func TestRequestsThatFetchAreTold(t *testing.T) {
	for name, c := range map[string]struct {
		page string
		want Load
	}{
		"vLLM": {`vllm:num_requests_running{engine="0"} 2
vllm:num_requests_waiting{engine="0"} 5
vllm:num_requests_kv_fetch_by_stage{engine="0",stage="waiting_to_start"} 1
vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 3
vllm:num_requests_kv_fetch_by_stage{engine="0",stage="completed_waiting"} 1
`, Load{Running: 2, Waiting: 5, Fetching: 3}},
		"SGLang's decode engine": {`sglang:num_running_reqs{priority="",tp_rank="0"} 3
sglang:num_running_reqs{priority="1",tp_rank="0"} 2
sglang:num_running_reqs{priority="2",tp_rank="0"} 1
sglang:num_queue_reqs{tp_rank="0"} 1
sglang:num_decode_prealloc_queue_reqs{tp_rank="0"} 2
sglang:num_decode_transfer_queue_reqs{tp_rank="0"} 4
sglang:num_decode_transfer_queue_reqs{tp_rank="1"} 4
`, Load{Running: 3, Waiting: 7, Fetching: 4}},
		"SGLang's prefill engine": {`sglang:num_running_reqs 1
sglang:num_queue_reqs 2
sglang:num_prefill_bootstrap_queue_reqs 5
sglang:num_prefill_inflight_queue_reqs 9
`, Load{Running: 1, Waiting: 7}},
	} {
		m, err := parseMetrics(strings.NewReader(c.page))
		require.NoError(t, err)
		c.want.At = time.Unix(1, 0)
		got := m.loadAt(c.want.At)
		assert.Equal(t, c.want, got, name)
		assert.Equal(t, c.want.Waiting-c.want.Fetching, got.Queued(), name)
	}
	_, err := parseMetrics(strings.NewReader("sglang:num_decode_transfer_queue_reqs 1e10\n"))
	require.Error(t, err)
}
