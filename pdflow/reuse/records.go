// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"context"
	"errors"
	"net/http"
)

// records reads TensorRT-LLM's GET /perf_metrics (serve/openai_server.py). It lists the requests that ended since the
// last call, and gives each record once. A record has kv_cache_size if the request's KV came from another server; both
// cache transceivers set it (cacheFormatter.cpp as it receives, the Python transceiver when a transfer has completed).
// Without the settings return_perf_metrics and perf_metrics_max_requests the list is always empty. ok is false if the
// engine has no such page.
func records(ctx context.Context, client *http.Client, engine string) (c counts, ok bool, err error) {
	type timing struct {
		Size float64 `json:"kv_cache_size"`
	}
	var list []struct {
		Metrics struct {
			Timing timing `json:"timing_metrics"`
		} `json:"perf_metrics"`
	}
	err = readJSON(ctx, client, http.MethodGet, engine, "/perf_metrics", nil, &list)
	if _, absent := errors.AsType[noPage](err); absent {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	c = counts{recorded: int64(len(list))}
	for _, r := range list {
		if size := r.Metrics.Timing.Size; size > 0 {
			c[recordedMoved]++
			c[recordedBytes] = min(c[recordedBytes]+int64(plausible(size)), most)
		}
	}
	return c, true, nil
}
