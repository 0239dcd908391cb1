// SPDX-License-Identifier: Apache-2.0

package core

import (
	"fmt"

	"github.com/pdkit/pdkit/enginesim/internal/metrics"
)

// WriteTransfers writes the metrics of vLLM's NIXL connectors.
func (c *Core) WriteTransfers(p *metrics.Page) {
	s := c.Stats
	s.mu.Lock()
	defer s.mu.Unlock()
	p.Histograms(s.histograms, metrics.TransferHistograms)
	p.Counter("nixl_num_failed_transfers_total", s.FailedTransfers)
	p.Counter("nixl_num_failed_notifications_total", s.FailedNotifications)
	p.Counter("nixl_num_kv_expired_reqs_total", s.Expired)
	p.Counter("nixl_num_notifications_after_expiry_total", s.AfterExpiry)
}

// WriteMetrics writes what all engines have. unspecified says that the KV from elsewhere comes from no tier that the
// page knows.
func (c *Core) WriteMetrics(p *metrics.Page, unspecified bool) {
	t, s := c.Totals(), c.Stats
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range []string{"flops", "read_bytes", "write_bytes"} {
		p.Counter("estimated_"+name+"_per_gpu_total", 0)
	}
	p.Gauge("num_requests_running", float64(t.Running))
	p.Gauge("num_requests_waiting", float64(t.Waiting))
	loading := s.loading
	p.By("num_requests_waiting_by_reason", "gauge", "reason", []string{"capacity", "deferred"},
		int64(t.Waiting)-loading, loading)
	p.By("num_requests_kv_fetch_by_stage", "gauge", "stage",
		[]string{"waiting_to_start", "in_progress", "completed_waiting"}, 0, loading, 0)
	p.By("engine_sleep_state", "gauge", "sleep_state", []string{"awake", "weights_offloaded", "discard_all"}, 1, 0, 0)
	p.Gauge("kv_cache_usage_perc", float64(t.UsedBlocks)/float64(c.cfg.Blocks))
	p.Counter("prefix_cache_queries_total", s.prefixQueries)
	p.Counter("prefix_cache_hits_total", s.prefixHits)
	p.Counter("external_prefix_cache_queries_total", s.externalQueries)
	p.Counter("external_prefix_cache_hits_total", s.externalHits)
	p.Counter("mm_cache_queries_total", 0)
	p.Counter("mm_cache_hits_total", 0)
	p.Counter("num_preemptions_total", s.Preemptions)
	p.Counter("prompt_tokens_total", s.PromptTokens)
	p.By("prompt_tokens_by_source_total", "counter", "source",
		[]string{"local_compute", "local_cache_hit", "external_kv_transfer"},
		s.LocalCompute, s.LocalCacheHit, s.ExternalKVTransfer)
	p.Counter("prompt_tokens_cached_total", s.cachedTokens)
	p2p, other := s.cachedP2P, int64(0)
	if unspecified {
		p2p, other = 0, s.cachedP2P
	}
	p.By("prompt_tokens_cached_by_source_total", "counter", "source",
		[]string{"device", "host", "p2p", "disk", "external_unspecified"}, s.cachedDevice, 0, p2p, 0, other)
	p.Counter("generation_tokens_total", s.GenerationTokens)
	p.By("request_success_total", "counter", "finished_reason",
		[]string{"stop", "length", "abort", "error", "repetition"},
		s.successStop, s.successLength, s.successAbort, s.Errors, 0)
	p.Histograms(s.histograms, metrics.RequestHistograms)
	p.Head("admission_rejections_total", "counter")
	for _, reason := range []string{"max_num_queued_reqs", "max_num_queued_tokens"} {
		fmt.Fprintf(&p.B, "vllm:admission_rejections_total{model_name=%q,reason=%q} 0.0\n", p.Model, reason)
	}
	fmt.Fprintf(&p.B, "# HELP vllm:cache_config_info See vLLM's metrics.\n# TYPE vllm:cache_config_info gauge\n"+
		"vllm:cache_config_info{block_size=\"%d\",enable_prefix_caching=\"True\",engine=\"0\","+
		"num_gpu_blocks=\"%d\"} 1.0\n", c.cfg.BlockSize, c.cfg.Blocks)
}
