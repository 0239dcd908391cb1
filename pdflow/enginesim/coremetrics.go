// SPDX-License-Identifier: Apache-2.0

package enginesim

import "fmt"

// writeTransfers writes the metrics of vLLM's NIXL connectors.
func (c *core) writeTransfers(p *page) {
	s := c.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range nixlHistograms {
		p.histogram(name, s.histograms[name])
	}
	p.counter("nixl_num_failed_transfers_total", s.FailedTransfers)
	p.counter("nixl_num_failed_notifications_total", s.FailedNotifications)
	p.counter("nixl_num_kv_expired_reqs_total", s.Expired)
	p.counter("nixl_num_notifications_after_expiry_total", s.AfterExpiry)
}

// writeMetrics writes what all engines have. unspecified says that the KV from elsewhere comes from no tier that the
// page knows.
func (c *core) writeMetrics(p *page, unspecified bool) {
	t, s := c.totals(), c.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range []string{"flops", "read_bytes", "write_bytes"} {
		p.counter("estimated_"+name+"_per_gpu_total", 0)
	}
	p.gauge("num_requests_running", float64(t.Running))
	p.gauge("num_requests_waiting", float64(t.Waiting))
	loading := s.loading
	p.by("num_requests_waiting_by_reason", "gauge", "reason", []string{"capacity", "deferred"}, int64(t.Waiting)-loading, loading)
	p.by("num_requests_kv_fetch_by_stage", "gauge", "stage", []string{"waiting_to_start", "in_progress", "completed_waiting"}, 0, loading, 0)
	p.by("engine_sleep_state", "gauge", "sleep_state", []string{"awake", "weights_offloaded", "discard_all"}, 1, 0, 0)
	p.gauge("kv_cache_usage_perc", float64(t.UsedBlocks)/float64(c.cfg.Blocks))
	p.counter("prefix_cache_queries_total", s.prefixQueries)
	p.counter("prefix_cache_hits_total", s.prefixHits)
	p.counter("external_prefix_cache_queries_total", s.externalQueries)
	p.counter("external_prefix_cache_hits_total", s.externalHits)
	p.counter("mm_cache_queries_total", 0)
	p.counter("mm_cache_hits_total", 0)
	p.counter("num_preemptions_total", s.Preemptions)
	p.counter("prompt_tokens_total", s.PromptTokens)
	p.by("prompt_tokens_by_source_total", "counter", "source",
		[]string{"local_compute", "local_cache_hit", "external_kv_transfer"}, s.LocalCompute, s.LocalCacheHit, s.ExternalKVTransfer)
	p.counter("prompt_tokens_cached_total", s.cachedTokens)
	p2p, other := s.cachedP2P, int64(0)
	if unspecified {
		p2p, other = 0, s.cachedP2P
	}
	p.by("prompt_tokens_cached_by_source_total", "counter", "source",
		[]string{"device", "host", "p2p", "disk", "external_unspecified"}, s.cachedDevice, 0, p2p, 0, other)
	p.counter("generation_tokens_total", s.GenerationTokens)
	p.by("request_success_total", "counter", "finished_reason",
		[]string{"stop", "length", "abort", "error", "repetition"}, s.successStop, s.successLength, s.successAbort, s.Errors, 0)
	for _, name := range histogramOrder {
		p.histogram(name, s.histograms[name])
	}
	p.head("admission_rejections_total", "counter")
	for _, reason := range []string{"max_num_queued_reqs", "max_num_queued_tokens"} {
		fmt.Fprintf(&p.b, "vllm:admission_rejections_total{model_name=%q,reason=%q} 0.0\n", p.model, reason)
	}
	fmt.Fprintf(&p.b, "# HELP vllm:cache_config_info See vLLM's metrics.\n# TYPE vllm:cache_config_info gauge\n"+
		"vllm:cache_config_info{block_size=\"%d\",enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"%d\"} 1.0\n", c.cfg.BlockSize, c.cfg.Blocks)
}
