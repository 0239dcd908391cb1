// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"strconv"
	"strings"
	"time"
)

// sample names one time series, or the sum of several, on an engine's /metrics page: a metric's name and, if label is
// not empty, a pair name="value" that the series must have.
type sample struct{ name, label string }

// vLLM 0.32.0, NixlConnector. A counter is absent until it first rises, which reads as 0.
var (
	takenOver     = sample{"vllm:prompt_tokens_by_source_total", `source="external_kv_transfer"`} // D, tokens
	bytesMoved    = sample{"vllm:nixl_bytes_transferred_sum", ""}                                 // D, bytes
	failedReads   = sample{"vllm:nixl_num_failed_transfers_total", ""}                            // D
	failedNotices = sample{"vllm:nixl_num_failed_notifications_total", ""}                        // D
	// P: nobody read it in time
	expired = sample{"vllm:nixl_num_kv_expired_reqs_total", ""}
	// P: read late, or twice
	lateNotices = sample{"vllm:nixl_num_notifications_after_expiry_total", ""}
	// P, 0 to 1: pinned blocks
	cacheUsed = sample{"vllm:kv_cache_usage_perc", ""}
)

// metrics is an engine's whole /metrics page at one time.
type metrics []string

func readMetrics(ctx context.Context, engine string) (metrics, error) {
	page, err := get(ctx, engine+"/metrics", 10*time.Second)
	return parseMetrics(string(page)), err
}

func parseMetrics(page string) (lines metrics) {
	for line := range strings.Lines(page) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			lines = append(lines, line)
		}
	}
	return lines
}

// sum is the sum of the series that s names.
func (m metrics) sum(s sample) float64 {
	total := 0.0
	for _, line := range m {
		labels, found := strings.CutPrefix(line, s.name)
		if !found || labels == "" || labels[0] != '{' && labels[0] != ' ' || !strings.Contains(labels, s.label) {
			continue
		}
		value, err := strconv.ParseFloat(labels[strings.LastIndexByte(labels, ' ')+1:], 64)
		if err == nil {
			total += value
		}
	}
	return total
}

// waitFor reads an engine's metrics until ok accepts them, since they follow a response by up to a second, or until the
// time is over. It returns the last page in both cases; the caller judges it.
func waitFor(ctx context.Context, engine string, patience time.Duration, ok func(metrics) bool) (metrics, error) {
	for end := time.Now().Add(patience); ; {
		page, err := readMetrics(ctx, engine)
		if err != nil || ok(page) || time.Now().After(end) {
			return page, err
		}
		time.Sleep(100 * time.Millisecond)
	}
}
