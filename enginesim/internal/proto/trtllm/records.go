// SPDX-License-Identifier: Apache-2.0

package trtllm

import (
	"net/http"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// perfRecord is what GET /perf_metrics tells of one request that has ended (serve/openai_server.py, get_perf_metrics).
// kv_cache_size is there only of a request whose KV was received from another server.
type perfRecord struct {
	Metrics struct {
		Timing map[string]any `json:"timing_metrics"`
	} `json:"perf_metrics"`
}

// record keeps a request's record, of which kv bytes of KV were received. The oldest makes room, and nothing is kept
// unless the server was told to.
func (c *trtllm) record(kv int) {
	if c.keep <= 0 {
		return
	}
	var r perfRecord
	r.Metrics.Timing = map[string]any{}
	if kv > 0 {
		r.Metrics.Timing["kv_cache_size"] = kv
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.records = append(c.records, r); len(c.records) > c.keep {
		c.records = c.records[1:]
	}
}

// giveRecords answers GET /perf_metrics: a reader takes the records away.
func (c *trtllm) giveRecords(w http.ResponseWriter) {
	c.mu.Lock()
	all := c.records
	c.records = nil
	c.mu.Unlock()
	if all == nil {
		all = []perfRecord{}
	}
	api.WriteJSON(w, http.StatusOK, python.Encode(all))
}

// trtAlone is a request without disaggregated_params, which a server serves alone.
type trtAlone struct {
	core.NoTransfer
	c *trtllm
}

func (t trtAlone) Finished(*core.Sequence, string) any {
	t.c.record(0)
	return nil
}
