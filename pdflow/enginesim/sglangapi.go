// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
)

// parsers are the APIs in which SGLang reads bootstrap members.
func (c *sglangDisagg) parsers() map[string]parser {
	return map[string]parser{
		"/generate":            c.meets(c.parse),
		"/v1/completions":      c.meets(parseCompletion),
		"/v1/chat/completions": c.meets(parseChat),
	}
}

// parse reads SGLang's own API.
func (c *sglangDisagg) parse(_ *target, _ *http.Request, body []byte) (*call, *apiError) {
	return parseSGLang(c.host.role == roleConsumer, body)
}

// serve answers what a router asks an engine beside requests.
func (c *sglangDisagg) serve(w http.ResponseWriter, r *http.Request) bool {
	mode := map[string]string{roleProducer: "prefill", roleConsumer: "decode", roleBoth: "null"}[c.host.role]
	switch r.Method + " " + r.URL.Path {
	case "GET /health_generate":
		writeHealth(w, c.host.ended() == nil)
	case "GET /server_info", "GET /get_server_info":
		writeJSON(w, http.StatusOK, encode(map[string]any{"disaggregation_mode": mode, "dp_size": c.ranks, "page_size": c.host.core.blockSize, "served_model_name": c.host.model}))
	case "GET /metrics":
		c.metrics(w)
	case "GET /model_info", "GET /get_model_info":
		writeJSON(w, http.StatusOK, encode(map[string]any{"model_path": c.host.model, "is_generation": true}))
	default:
		return false
	}
	return true
}

// rendezvous are the members that both legs carry, each a value or a list of one
// value for each sequence.
type rendezvous struct {
	Host   json.RawMessage `json:"bootstrap_host"`
	Port   json.RawMessage `json:"bootstrap_port"`
	Room   json.RawMessage `json:"bootstrap_room"`
	Rank   json.RawMessage `json:"disagg_prefill_dp_rank"`
	Routed json.RawMessage `json:"routed_dp_rank"`
	Alias  json.RawMessage `json:"data_parallel_rank"`
}

// metrics is the page that --enable-metrics turns on, as far as it tells of transfers
// (srt/observability/metrics_collector.py): sizes are in 2^20 bytes, and the sender's.
func (c *sglangDisagg) metrics(w http.ResponseWriter) {
	if c.host.extra["enable_metrics"] != "1" {
		writeError(w, errNotFound())
		return
	}
	t := c.core.totals()
	text := fmt.Sprintf("# TYPE sglang:kv_transfer_total_mb histogram\n"+
		"sglang:kv_transfer_total_mb_count{model_name=%[1]q,tp_rank=\"0\"} %[2]d.0\n"+
		"sglang:kv_transfer_total_mb_sum{model_name=%[1]q,tp_rank=\"0\"} %[3]g\n"+
		"sglang:num_transfer_failed_reqs_total{model_name=%[1]q,tp_rank=\"0\"} %[4]d.0\n"+
		"sglang:prompt_tokens_total{model_name=%[1]q,tp_rank=\"0\"} %[5]d.0\n",
		c.host.model, t.Transfers, float64(t.BytesTransferred)/(1<<20), t.FailedTransfers, t.PromptTokens)
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write([]byte(text))
}

// meets gives each sequence of a call its room.
func (c *sglangDisagg) meets(parse parser) parser {
	return func(e *target, r *http.Request, body []byte) (*call, *apiError) {
		made, bad := parse(e, r, body)
		if bad != nil || !c.disaggregated() {
			return made, bad
		}
		var q rendezvous
		if bad := decodeBody(body, &q); bad != nil {
			return nil, bad
		}
		count := len(made.gens)
		rooms, ok := eachRoom(q.Room, count, made.n)
		if !ok {
			return nil, badRequest("bootstrap_room", "Disaggregated request received without bootstrap room id")
		}
		hosts, ok1 := each(q.Host, count, made.n)
		ports, ok2 := each(q.Port, count, made.n)
		if !ok1 || !ok2 {
			return nil, badRequest("bootstrap_host", "bootstrap lists do not have the length of the batch")
		}
		for i, g := range made.gens {
			g.local = false
			g.params = kvParams{"bootstrap_room": rooms[i], "bootstrap_host": hosts[i], "bootstrap_port": ports[i], "disagg_prefill_dp_rank": q.Rank, "routed_dp_rank": q.Routed, "data_parallel_rank": q.Alias}
		}
		if c.host.role == roleProducer {
			// P makes the first token and no more, and ends by length.
			made.maxTokens, made.limited, made.minTokens = 1, true, min(made.minTokens, 1)
			for _, g := range made.gens {
				g.stop, g.stopIDs, g.minTokens = nil, nil, min(g.minTokens, 1)
			}
		}
		return made, nil
	}
}

// each is a member for each of the sequences: a list of all, a list with one item for
// each prompt, which its n answers share, or one value for all.
func each(raw json.RawMessage, count, n int) ([]json.RawMessage, bool) {
	out := make([]json.RawMessage, count)
	if len(raw) == 0 || raw[0] != '[' {
		for i := range out {
			out[i] = raw
		}
		return out, true
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil {
		return nil, false
	}
	switch len(list) {
	case count:
		return list, true
	case count / max(n, 1):
		for i := range out {
			out[i] = list[i/max(n, 1)]
		}
		return out, true
	}
	return nil, false
}

// eachRoom is each for rooms, which count up from one value.
func eachRoom(raw json.RawMessage, count, n int) ([]json.RawMessage, bool) {
	out, ok := each(raw, count, n)
	if !ok {
		return nil, false
	}
	for i := range out {
		room, err := strconv.ParseInt(string(out[i]), 10, 64)
		if err != nil || room < 0 {
			return nil, false
		}
		if raw[0] != '[' {
			out[i] = strconv.AppendInt(nil, room+int64(i), 10)
		}
	}
	return out, true
}
