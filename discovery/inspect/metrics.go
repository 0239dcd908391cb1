// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"bufio"
	"io"
	"math"
	"strconv"
	"strings"
)

// metrics holds what is read from a page of Prometheus's text format.
type metrics struct {
	vllm    bool             // the page is vLLM's
	engines map[int]struct{} // vLLM's engine labels
	started float64          // process_start_time_seconds, 0 if missing
	usage   float64
	running float64
	waiting float64
	fetches float64
	load    bool // the page has at least one of the three
	kv      KV
}

const (
	maxLine = 64 << 10
	maxSum  = 1e9 // requests; a larger number makes no sense
)

// sample is a line of the page: what it counts for, and the label without which it does not.
type sample struct {
	label, value string // "": any
	count        func(m *metrics, v float64)
}

// names are the samples that are read. vllm:gpu_cache_usage_perc is the older name of the first.
var names = map[string][]sample{
	"vllm:kv_cache_usage_perc":   {{count: (*metrics).use}},
	"vllm:gpu_cache_usage_perc":  {{count: (*metrics).use}},
	"sglang:token_usage":         {{count: (*metrics).use}},
	"vllm:num_requests_running":  {{count: func(m *metrics, v float64) { m.running, m.load = m.running+v, true }}},
	"sglang:num_running_reqs":    {{count: func(m *metrics, v float64) { m.running, m.load = m.running+v, true }}},
	"vllm:num_requests_waiting":  {{count: (*metrics).wait}},
	"sglang:num_queue_reqs":      {{count: (*metrics).wait}},
	"process_start_time_seconds": {{count: func(m *metrics, v float64) { m.started = v }}},

	// vLLM counts those that fetch KV among those that wait. SGLang does not, nor those that wait for a place in
	// decode's memory or for its word (0.5.23's metrics_reporter.py).
	"vllm:num_requests_kv_fetch_by_stage":     {{"stage", "in_progress", (*metrics).fetch}},
	"sglang:num_decode_transfer_queue_reqs":   {{count: (*metrics).wait}, {count: (*metrics).fetch}},
	"sglang:num_decode_prealloc_queue_reqs":   {{count: (*metrics).wait}},
	"sglang:num_prefill_bootstrap_queue_reqs": {{count: (*metrics).wait}},

	"vllm:prompt_tokens_by_source_total": {
		{"source", "external_kv_transfer", func(m *metrics, v float64) { m.kv.Taken += v }},
		{"source", "local_compute", func(m *metrics, v float64) { m.kv.Computed += v }},
	},
	"sglang:realtime_tokens_total": {
		{"mode", "prefill_compute", func(m *metrics, v float64) { m.kv.Computed += v }},
		{"mode", "decode", func(m *metrics, v float64) { m.kv.Generated += v }},
	},
	"vllm:generation_tokens_total":         {{count: func(m *metrics, v float64) { m.kv.Generated += v }}},
	"vllm:request_success_total":           {{count: func(m *metrics, v float64) { m.kv.Requests += v }}},
	"sglang:num_requests_total":            {{count: func(m *metrics, v float64) { m.kv.Requests += v }}},
	"vllm:nixl_bytes_transferred_sum":      {{count: func(m *metrics, v float64) { m.kv.Bytes += v }}},
	"vllm:nixl_xfer_time_seconds_sum":      {{count: func(m *metrics, v float64) { m.kv.Seconds += v }}},
	"vllm:nixl_num_failed_transfers_total": {{count: func(m *metrics, v float64) { m.kv.Failed += v }}},
	"vllm:nixl_num_kv_expired_reqs_total":  {{count: func(m *metrics, v float64) { m.kv.Expired += v }}},
	"sglang:kv_transfer_total_mb_sum":      {{count: func(m *metrics, v float64) { m.kv.Bytes += v * (1 << 20) }}},
	"sglang:kv_transfer_latency_ms_sum":    {{count: func(m *metrics, v float64) { m.kv.Seconds += v / 1000 }}},
	"lmcache:local_cache_usage":            {{count: func(m *metrics, v float64) { m.kv.Memory += v }}},
	"lmcache:local_storage_usage":          {{count: func(m *metrics, v float64) { m.kv.Disk += v }}},
}

func (m *metrics) wait(v float64) { m.waiting, m.load = m.waiting+v, true }

func (m *metrics) fetch(v float64) { m.fetches += v }

func (m *metrics) use(v float64) {
	if v <= 1 {
		m.usage, m.load = max(m.usage, v), true
	}
}

// parseMetrics reads a page. It skips lines that are unknown or broken. If the page is longer than its reader allows,
// it returns the reader's error and no metrics.
func parseMetrics(r io.Reader) (*metrics, error) {
	m := &metrics{engines: map[int]struct{}{}}
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 4<<10), maxLine)
	for lines.Scan() {
		line := lines.Text()
		name, rest := cutName(line)
		samples := names[name]
		if samples == nil {
			continue
		}
		labels, rest, ok := cutLabels(rest)
		if !ok {
			continue
		}
		text, _, _ := strings.Cut(strings.TrimSpace(rest), " ") // a time stamp may follow the value
		v, err := strconv.ParseFloat(text, 64)
		if err != nil || math.IsNaN(v) || v < 0 || v > 1e18 {
			continue
		}
		if rank := labels["tp_rank"]; rank != "" && rank != "0" {
			continue // SGLang can be set to export the same value from each tensor-parallel rank
		}
		if labels["priority"] != "" {
			continue // with priorities, SGLang counts what each has beside the sum of all
		}
		if strings.HasPrefix(name, "vllm:") {
			m.vllm = true
			if n, err := strconv.Atoi(labels["engine"]); err == nil && n >= 0 && n < maxRanks {
				m.engines[n] = struct{}{}
			}
		}
		for _, s := range samples {
			if labels[s.label] == s.value {
				s.count(m, v)
			}
		}
	}
	if lines.Err() != nil || m.running > maxSum || m.waiting > maxSum || m.fetches > maxSum {
		return nil, errSenseless
	}
	return m, nil
}

func cutName(line string) (name, rest string) {
	if i := strings.IndexAny(line, "{ \t"); i > 0 {
		return line[:i], line[i:]
	}
	return "", ""
}

// cutLabels reads {name="value",…}. In a value, \ escapes \, " and line feeds.
func cutLabels(s string) (labels map[string]string, rest string, ok bool) {
	if !strings.HasPrefix(s, "{") {
		return nil, s, true
	}
	labels = map[string]string{}
	for s = s[1:]; ; {
		s = strings.TrimLeft(s, ", ")
		if rest, ended := strings.CutPrefix(s, "}"); ended {
			return labels, rest, true
		}
		name, after, found := strings.Cut(s, `="`)
		if !found {
			return nil, "", false
		}
		end := 0
		for end < len(after) && after[end] != '"' {
			if after[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(after) {
			return nil, "", false
		}
		labels[name] = after[:end] // escapes stay, since the labels that are read have none
		s = after[end+1:]
	}
}
