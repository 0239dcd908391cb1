// SPDX-License-Identifier: Apache-2.0

// Package metrics writes vLLM's /metrics page: its histograms, and the Prometheus text format.
package metrics

import (
	"bytes"
	"fmt"
	"math"
	"slices"

	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// histogram counts observations in vLLM's own buckets.
type histogram struct {
	bounds []float64
	counts []int64 // not cumulative; the last is above all bounds
	count  int64
	sum    float64
}

// A Kind is a histogram's name and its buckets.
type Kind struct {
	name   string
	bounds []float64
}

var (
	tokenBuckets     = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000}
	tokenTimeBuckets = []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	phaseBuckets     = []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
		7680}
)

// RequestHistograms are the histograms that each engine of vLLM 0.32.0 has, in the order of its /metrics page.
var RequestHistograms = []Kind{
	{"request_prompt_tokens", tokenBuckets},
	{"request_generation_tokens", tokenBuckets},
	{"iteration_tokens_total", []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}},
	{"request_max_num_generation_tokens", tokenBuckets},
	{"request_params_n", []float64{1, 2, 5, 10, 20}},
	{"request_params_max_tokens", tokenBuckets},
	{"time_to_first_token_seconds", []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10,
		20, 40, 80, 160, 640, 2560}},
	{"inter_token_latency_seconds", tokenTimeBuckets},
	{"request_time_per_output_token_seconds", tokenTimeBuckets},
	{"e2e_request_latency_seconds", phaseBuckets},
	{"request_queue_time_seconds", phaseBuckets},
	{"request_inference_time_seconds", phaseBuckets},
	{"request_prefill_time_seconds", phaseBuckets},
	{"request_decode_time_seconds", phaseBuckets},
	{"request_num_preemptions", []float64{1, 2, 3, 4, 5, 10, 20}},
	{"request_prefill_kv_computed_tokens", tokenBuckets},
}

// TransferHistograms are those of vLLM's NIXL connectors.
var TransferHistograms = []Kind{
	{"nixl_xfer_time_seconds", []float64{.005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5}},
	{"nixl_post_time_seconds", []float64{.001, .005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5}},
	{"nixl_bytes_transferred", []float64{1 << 11, 1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25,
		1 << 27, 1 << 29, 1 << 31, 1 << 33}},
	{"nixl_num_descriptors", []float64{10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000}},
}

// Histograms are an engine's histograms, by name.
type Histograms map[string]*histogram

// NewHistograms makes all histograms, without observations.
func NewHistograms() Histograms {
	all := Histograms{}
	for _, k := range slices.Concat(RequestHistograms, TransferHistograms) {
		all[k.name] = &histogram{bounds: k.bounds, counts: make([]int64, len(k.bounds)+1)}
	}
	return all
}

// Observe adds a value to a histogram.
func (all Histograms) Observe(name string, value float64) {
	h := all[name]
	i := 0
	for i < len(h.bounds) && value > h.bounds[i] {
		i++
	}
	h.counts[i]++
	h.count++
	h.sum += value
}

// Page writes the Prometheus text format.
type Page struct {
	B     bytes.Buffer
	Model string
}

// Head writes what comes before the samples of a metric.
func (p *Page) Head(name, kind string) {
	fmt.Fprintf(&p.B, "# HELP vllm:%s See vLLM's metrics.\n# TYPE vllm:%s %s\n", name, name, kind)
}

// Sample is one line's labels beside engine and model_name, and its value.
type Sample struct {
	before, After string // labels before and after model_name, in name order
	Value         float64
}

// Family writes a metric with its samples.
func (p *Page) Family(name, kind string, samples ...Sample) {
	p.Head(name, kind)
	for _, s := range samples {
		fmt.Fprintf(&p.B, "vllm:%s{engine=\"0\",%smodel_name=%q%s} %s\n", name, s.before, p.Model, s.After,
			python.Number(s.Value))
	}
}

// Counter writes a counter without further labels.
func (p *Page) Counter(name string, v int64) { p.Family(name, "counter", Sample{Value: float64(v)}) }

// Gauge writes a gauge without further labels.
func (p *Page) Gauge(name string, v float64) { p.Family(name, "gauge", Sample{Value: v}) }

// By writes one line per value of a label.
func (p *Page) By(name, kind, label string, values []string, counts ...int64) {
	samples := make([]Sample, len(values))
	for i, value := range values {
		text := fmt.Sprintf("%s=%q", label, value)
		samples[i] = Sample{Value: float64(counts[i])}
		if label < "model_name" {
			samples[i].before = text + ","
		} else {
			samples[i].After = "," + text
		}
	}
	p.Family(name, kind, samples...)
}

// Histograms writes the histograms of some kinds.
func (p *Page) Histograms(all Histograms, kinds []Kind) {
	for _, k := range kinds {
		p.histogram(k.name, all[k.name])
	}
}

func (p *Page) histogram(name string, h *histogram) {
	p.Head(name, "histogram")
	sum := int64(0)
	for i, n := range h.counts {
		sum += n
		le := math.Inf(1)
		if i < len(h.bounds) {
			le = h.bounds[i]
		}
		fmt.Fprintf(&p.B, "vllm:%s_bucket{engine=\"0\",le=%q,model_name=%q} %s\n", name, python.Number(le), p.Model,
			python.Number(float64(sum)))
	}
	fmt.Fprintf(&p.B, "vllm:%s_count{engine=\"0\",model_name=%q} %s\n", name, p.Model, python.Number(float64(h.count)))
	fmt.Fprintf(&p.B, "vllm:%s_sum{engine=\"0\",model_name=%q} %s\n", name, p.Model, python.Number(h.sum))
}
