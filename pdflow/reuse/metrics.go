// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// series names a metric: the sum of its time series, or of those with a label name="value".
type series struct {
	name, label string
	unit        float64 // what one count of the metric stands for; 0 means 1
}

// vLLM's counters (0.32.0). A counter is absent until it first rises; absent reads as 0.
var (
	promptTokens  = series{name: "vllm:prompt_tokens_total"}
	takenOver     = series{name: "vllm:prompt_tokens_by_source_total", label: `source="external_kv_transfer"`}
	computed      = series{name: "vllm:prompt_tokens_by_source_total", label: `source="local_compute"`}
	asked         = series{name: "vllm:external_prefix_cache_queries_total"}
	promised      = series{name: "vllm:external_prefix_cache_hits_total"}
	nixlBytes     = series{name: "vllm:nixl_bytes_transferred_sum"}
	failedReads   = series{name: "vllm:nixl_num_failed_transfers_total"}
	failedNotices = series{name: "vllm:nixl_num_failed_notifications_total"}
	expired       = series{name: "vllm:nixl_num_kv_expired_reqs_total"}
	late          = series{name: "vllm:nixl_num_notifications_after_expiry_total"}
)

// What SGLang counts where --enable-metrics is on (srt/observability/metrics_collector.py of 0.5.23): the prompt tokens
// of all requests, the tokens that its scheduler worked on, of these the prompt tokens that the engine computed, and on
// prefill engines what they sent (sizes are in 2^20 bytes).
var (
	sglangPrompts  = series{name: "sglang:prompt_tokens_total"}
	sglangTokens   = series{name: "sglang:realtime_tokens_total"}
	sglangComputed = series{name: "sglang:realtime_tokens_total", label: `mode="prefill_compute"`}

	sglangBytes  = series{name: "sglang:kv_transfer_total_mb_sum", unit: 1 << 20}
	sglangFailed = series{name: "sglang:num_transfer_failed_reqs_total"}
	sglangUnmet  = series{name: "sglang:num_bootstrap_failed_reqs_total"}
)

// The sums of TensorRT-LLM's records; see records.
var (
	recorded      = series{name: "records"}
	recordedMoved = series{name: "records with KV"}
	recordedBytes = series{name: "bytes of records"}
)

// maxPage is the largest /metrics page that is read, in bytes.
const maxPage = 16 << 20

// page is the lines of an engine's /metrics page that vLLM or SGLang itself writes, at one time.
type page []string

// by reports whether a line begins so: with a metric's name, or with "vllm:" or "sglang:" for all of that engine's.
func (p page) by(prefix string) bool {
	return slices.ContainsFunc(p, func(line string) bool { return strings.HasPrefix(line, prefix) })
}

// bySource reports whether the engine counts where prompt tokens came from.
func (p page) bySource() bool { return p.by(takenOver.name) }

func (p page) sum(s series) int64 {
	total := 0.0
	for _, line := range p {
		labels, found := strings.CutPrefix(line, s.name)
		if !found || labels == "" || labels[0] != '{' && labels[0] != ' ' || !strings.Contains(labels, s.label) {
			continue
		}
		fields := strings.Fields(labels[strings.LastIndexByte(labels, '}')+1:])
		if len(fields) == 0 {
			continue
		}
		if v, err := strconv.ParseFloat(fields[0], 64); err == nil {
			total += plausible(v)
		}
	}
	return int64(plausible(total * max(s.unit, 1)))
}

// most is the largest count that is believed. An engine's page may hold any number, and sums must not overflow.
const most = 1 << 50

// plausible bounds a count: NaN and negative numbers become 0.
func plausible(v float64) float64 {
	if !(v > 0) {
		return 0
	}
	return min(v, most)
}

// label returns the value of a label as a number, from the first series of a metric; 0 if there is none.
func (p page) label(metric, name string) int64 {
	for _, line := range p {
		if !strings.HasPrefix(line, metric+"{") {
			continue
		}
		for _, before := range []string{"{", ","} {
			if _, rest, ok := strings.Cut(line, before+name+`="`); ok {
				digits, _, _ := strings.Cut(rest, `"`)
				if n, err := strconv.ParseInt(digits, 10, 64); err == nil {
					return n
				}
			}
		}
	}
	return 0
}

func readPage(ctx context.Context, client *http.Client, engine string) (page, error) {
	resp, err := send(ctx, client, http.MethodGet, engine, "/metrics", nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var lines page
	scanner := bufio.NewScanner(io.LimitReader(resp.Body, maxPage))
	scanner.Buffer(make([]byte, 0, 64<<10), 1<<20)
	for scanner.Scan() {
		if line := scanner.Text(); strings.HasPrefix(line, "vllm:") || strings.HasPrefix(line, "sglang:") {
			lines = append(lines, line)
		}
	}
	return lines, scanner.Err()
}

// counts are the sums over the engines of one role.
type counts map[series]int64

var counted = []series{promptTokens, takenOver, computed, asked, promised, nixlBytes, failedReads, failedNotices,
	expired, late, sglangPrompts, sglangTokens, sglangComputed, sglangBytes, sglangFailed, sglangUnmet,
	recorded, recordedMoved, recordedBytes}

func (c counts) less(before counts) counts {
	d := counts{}
	for _, s := range counted {
		d[s] = max(0, c[s]-before[s]) // an engine that restarted counts from 0
	}
	return d
}
