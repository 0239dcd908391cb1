// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"fmt"
	"math"
	"net/http"
	"strconv"
)

// histogram counts observations in vLLM's own buckets.
type histogram struct {
	bounds []float64
	counts []int64 // not cumulative; the last is above all bounds
	count  int64
	sum    float64
}

// bucketsOf are the buckets of vLLM 0.32.0's histograms (its /metrics page).
var bucketsOf = map[string][]float64{
	"nixl_xfer_time_seconds":                {.005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5},
	"nixl_post_time_seconds":                {.001, .005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5},
	"nixl_bytes_transferred":                {1 << 11, 1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27, 1 << 29, 1 << 31, 1 << 33},
	"nixl_num_descriptors":                  {10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000},
	"request_prompt_tokens":                 tokenBuckets,
	"request_generation_tokens":             tokenBuckets,
	"request_max_num_generation_tokens":     tokenBuckets,
	"request_params_max_tokens":             tokenBuckets,
	"request_prefill_kv_computed_tokens":    tokenBuckets,
	"iteration_tokens_total":                {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384},
	"request_params_n":                      {1, 2, 5, 10, 20},
	"time_to_first_token_seconds":           {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560},
	"inter_token_latency_seconds":           tokenTimeBuckets,
	"request_time_per_output_token_seconds": tokenTimeBuckets,
	"e2e_request_latency_seconds":           phaseBuckets,
	"request_queue_time_seconds":            phaseBuckets,
	"request_inference_time_seconds":        phaseBuckets,
	"request_prefill_time_seconds":          phaseBuckets,
	"request_decode_time_seconds":           phaseBuckets,
	"request_num_preemptions":               {1, 2, 3, 4, 5, 10, 20},
}

var (
	tokenBuckets     = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000}
	tokenTimeBuckets = []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	phaseBuckets     = []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
)

// histogramOrder is the order of the page.
var histogramOrder = []string{
	"request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total", "request_max_num_generation_tokens", "request_params_n",
	"request_params_max_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
	"e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
	"request_decode_time_seconds", "request_num_preemptions", "request_prefill_kv_computed_tokens",
}

var nixlHistograms = []string{"nixl_xfer_time_seconds", "nixl_post_time_seconds", "nixl_bytes_transferred", "nixl_num_descriptors"}

func newHistograms() map[string]*histogram {
	all := make(map[string]*histogram, len(bucketsOf))
	for name, bounds := range bucketsOf {
		all[name] = &histogram{bounds: bounds, counts: make([]int64, len(bounds)+1)}
	}
	return all
}

// observe adds a value. The caller holds the lock.
func (c *counters) observe(name string, value float64) {
	h := c.histograms[name]
	i := 0
	for i < len(h.bounds) && value > h.bounds[i] {
		i++
	}
	h.counts[i]++
	h.count++
	h.sum += value
}

// page writes the Prometheus text format.
type page struct {
	b     bytes.Buffer
	model string
}

// number writes a float as Python's client does: always with a fraction or an
// exponent.
func number(v float64) string {
	switch {
	case math.IsInf(v, 1):
		return "+Inf"
	case v == math.Trunc(v) && math.Abs(v) < 1e6:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case v == math.Trunc(v):
		s := strconv.FormatFloat(v, 'e', -1, 64)
		return s
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}

func (p *page) head(name, kind string) {
	fmt.Fprintf(&p.b, "# HELP vllm:%s See vLLM's metrics.\n# TYPE vllm:%s %s\n", name, name, kind)
}

// sample is one line's labels beside engine and model_name, and its value.
type sample struct {
	before, after string // labels before and after model_name, in name order
	value         float64
}

func (p *page) family(name, kind string, samples ...sample) {
	p.head(name, kind)
	for _, s := range samples {
		fmt.Fprintf(&p.b, "vllm:%s{engine=\"0\",%smodel_name=%q%s} %s\n", name, s.before, p.model, s.after, number(s.value))
	}
}

func (p *page) counter(name string, v int64) { p.family(name, "counter", sample{value: float64(v)}) }
func (p *page) gauge(name string, v float64) { p.family(name, "gauge", sample{value: v}) }

// by writes one line per value of a label.
func (p *page) by(name, kind, label string, values []string, counts ...int64) {
	samples := make([]sample, len(values))
	for i, value := range values {
		text := fmt.Sprintf("%s=%q", label, value)
		samples[i] = sample{value: float64(counts[i])}
		if label < "model_name" {
			samples[i].before = text + ","
		} else {
			samples[i].after = "," + text
		}
	}
	p.family(name, kind, samples...)
}

func (p *page) histogram(name string, h *histogram) {
	p.head(name, "histogram")
	sum := int64(0)
	for i, n := range h.counts {
		sum += n
		le := math.Inf(1)
		if i < len(h.bounds) {
			le = h.bounds[i]
		}
		fmt.Fprintf(&p.b, "vllm:%s_bucket{engine=\"0\",le=%q,model_name=%q} %s\n", name, number(le), p.model, number(float64(sum)))
	}
	fmt.Fprintf(&p.b, "vllm:%s_count{engine=\"0\",model_name=%q} %s\n", name, p.model, number(float64(h.count)))
	fmt.Fprintf(&p.b, "vllm:%s_sum{engine=\"0\",model_name=%q} %s\n", name, p.model, number(h.sum))
}

// metrics is the /metrics page, in vLLM's names and labels.
func (n *node) metrics(w http.ResponseWriter) {
	l := n.core.load()
	p := &page{model: n.cfg.Model}
	n.stats.mu.Lock()
	n.writeMetrics(p, l)
	n.stats.mu.Unlock()
	h := w.Header()
	h.Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(p.b.Len()))
	h.Set("Vary", "Origin")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(p.b.Bytes())
}

func (n *node) writeMetrics(p *page, l load) {
	c := n.stats
	if n.cfg.Connector == connectorNIXL || n.cfg.Connector == connectorNIXLPush || n.cfg.Connector == connectorMulti {
		for _, name := range nixlHistograms {
			p.histogram(name, c.histograms[name])
		}
		p.counter("nixl_num_failed_transfers_total", c.FailedTransfers)
		p.counter("nixl_num_failed_notifications_total", c.FailedNotifications)
		p.counter("nixl_num_kv_expired_reqs_total", c.Expired)
		p.counter("nixl_num_notifications_after_expiry_total", c.AfterExpiry)
	}
	if own, ok := n.conn.(interface{ metrics(p *page) }); ok {
		own.metrics(p)
	}
	for _, name := range []string{"flops", "read_bytes", "write_bytes"} {
		p.counter("estimated_"+name+"_per_gpu_total", 0)
	}
	// A request that waits for KV has its blocks, but does not run yet.
	p.gauge("num_requests_running", float64(int64(l.running)-c.loading))
	p.gauge("num_requests_waiting", float64(int64(l.waiting)+c.loading))
	p.by("num_requests_waiting_by_reason", "gauge", "reason", []string{"capacity", "deferred"}, int64(l.waiting), c.loading)
	p.by("num_requests_kv_fetch_by_stage", "gauge", "stage", []string{"waiting_to_start", "in_progress", "completed_waiting"}, 0, c.loading, 0)
	p.by("engine_sleep_state", "gauge", "sleep_state", []string{"awake", "weights_offloaded", "discard_all"}, 1, 0, 0)
	p.gauge("kv_cache_usage_perc", float64(l.used)/float64(n.cfg.Blocks))
	p.counter("prefix_cache_queries_total", c.prefixQueries)
	p.counter("prefix_cache_hits_total", c.prefixHits)
	p.counter("external_prefix_cache_queries_total", c.externalQueries)
	p.counter("external_prefix_cache_hits_total", c.externalHits)
	p.counter("mm_cache_queries_total", 0)
	p.counter("mm_cache_hits_total", 0)
	p.counter("num_preemptions_total", c.Preemptions)
	p.counter("prompt_tokens_total", c.PromptTokens)
	p.by("prompt_tokens_by_source_total", "counter", "source",
		[]string{"local_compute", "local_cache_hit", "external_kv_transfer"}, c.LocalCompute, c.LocalCacheHit, c.ExternalKVTransfer)
	p.counter("prompt_tokens_cached_total", c.cachedTokens)
	p2p, unspecified := c.cachedP2P, int64(0)
	if u, ok := n.conn.(interface{ unspecified() bool }); ok && u.unspecified() {
		p2p, unspecified = 0, c.cachedP2P
	}
	p.by("prompt_tokens_cached_by_source_total", "counter", "source",
		[]string{"device", "host", "p2p", "disk", "external_unspecified"}, c.cachedDevice, 0, p2p, 0, unspecified)
	p.counter("generation_tokens_total", c.GenerationTokens)
	p.by("request_success_total", "counter", "finished_reason",
		[]string{"stop", "length", "abort", "error", "repetition"}, c.successStop, c.successLength, c.successAbort, c.Errors, 0)
	for _, name := range histogramOrder {
		p.histogram(name, c.histograms[name])
	}
	p.head("admission_rejections_total", "counter")
	for _, reason := range []string{"max_num_queued_reqs", "max_num_queued_tokens"} {
		fmt.Fprintf(&p.b, "vllm:admission_rejections_total{model_name=%q,reason=%q} 0.0\n", p.model, reason)
	}
	fmt.Fprintf(&p.b, "# HELP vllm:cache_config_info See vLLM's metrics.\n# TYPE vllm:cache_config_info gauge\n"+
		"vllm:cache_config_info{block_size=\"%d\",enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"%d\"} 1.0\n", n.cfg.BlockSize, n.cfg.Blocks)
}
