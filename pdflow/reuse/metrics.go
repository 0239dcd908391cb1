// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// series names the sum of the time series of one metric, or of those with a label name="value".
type series struct{ name, label string }

// What vLLM 0.32.0 counts. A counter is absent until it first rises, which reads as 0.
var (
	promptTokens  = series{"vllm:prompt_tokens_total", ""}
	takenOver     = series{"vllm:prompt_tokens_by_source_total", `source="external_kv_transfer"`}
	computed      = series{"vllm:prompt_tokens_by_source_total", `source="local_compute"`}
	asked         = series{"vllm:external_prefix_cache_queries_total", ""}
	promised      = series{"vllm:external_prefix_cache_hits_total", ""}
	nixlBytes     = series{"vllm:nixl_bytes_transferred_sum", ""}
	failedReads   = series{"vllm:nixl_num_failed_transfers_total", ""}
	failedNotices = series{"vllm:nixl_num_failed_notifications_total", ""}
	expired       = series{"vllm:nixl_num_kv_expired_reqs_total", ""}
	late          = series{"vllm:nixl_num_notifications_after_expiry_total", ""}
)

// maxPage is the largest /metrics page that is read, in bytes.
const maxPage = 16 << 20

// page is the vLLM part of an engine's /metrics page at one time.
type page []string

// bySource reports whether the engine tells where prompts came from.
func (p page) bySource() bool {
	for _, line := range p {
		if strings.HasPrefix(line, takenOver.name) {
			return true
		}
	}
	return false
}

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
			total += v
		}
	}
	return int64(total)
}

// label returns a label's value as a number, from the first series of a metric; 0 if there is none.
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
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, engine+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET /metrics answered %d", resp.StatusCode)
	}
	var lines page
	scanner := bufio.NewScanner(io.LimitReader(resp.Body, maxPage))
	scanner.Buffer(make([]byte, 0, 64<<10), 1<<20)
	for scanner.Scan() {
		if line := scanner.Text(); strings.HasPrefix(line, "vllm:") {
			lines = append(lines, line)
		}
	}
	return lines, scanner.Err()
}

// counts is what the engines of one role have counted together.
type counts map[series]int64

var counted = []series{promptTokens, takenOver, computed, asked, promised, nixlBytes, failedReads, failedNotices, expired, late}

func (c counts) less(before counts) counts {
	d := counts{}
	for _, s := range counted {
		d[s] = max(0, c[s]-before[s]) // an engine that was started anew counts from 0
	}
	return d
}
