// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"fmt"
	"math"
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

// page writes the Prometheus text format.
type page struct {
	b     bytes.Buffer
	model string
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
