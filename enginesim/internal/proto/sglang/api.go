// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// Parsers are the APIs in which SGLang reads bootstrap members.
func (c *sglangDisagg) Parsers() map[string]api.Parser {
	responses, messages := c.withRooms(api.ParseSGLangResponses), c.withRooms(api.ParseSGLangMessages)
	if c.Host.Extra["pd_routing_fields"] == "0" {
		responses, messages = c.withoutRooms(api.ParseSGLangResponses), c.withoutRooms(api.ParseSGLangMessages)
	}
	return map[string]api.Parser{
		"/generate":            c.withRooms(c.parse),
		"/v1/completions":      c.withRooms(api.ParseCompletion),
		"/v1/chat/completions": c.withRooms(api.ParseChat),
		"/v1/responses":        responses,
		"/v1/messages":         api.AnthropicErrors(messages),
	}
}

// parse reads SGLang's own API.
func (c *sglangDisagg) parse(_ *api.Engine, _ *http.Request, body []byte) (*api.Call, *api.Error) {
	return api.ParseSGLang(c.Host.Role == proto.RoleConsumer, body)
}

// Serve answers what a router asks an engine beside requests.
func (c *sglangDisagg) Serve(w http.ResponseWriter, r *http.Request) bool {
	mode := map[string]string{proto.RoleProducer: "prefill", proto.RoleConsumer: "decode",
		proto.RoleBoth: "null"}[c.Host.Role]
	switch r.Method + " " + r.URL.Path {
	case "GET /health_generate":
		api.WriteHealth(w, c.Host.Ended() == nil)
	case "GET /server_info", "GET /get_server_info":
		info := map[string]any{"disaggregation_mode": mode, "dp_size": c.ranks, "page_size": c.Core.BlockSize,
			"served_model_name": c.Host.Model}
		for setting, port := range c.Keeps() {
			info[setting] = json.RawMessage(port) // a number
		}
		api.WriteJSON(w, http.StatusOK, python.Encode(info))
	case "GET /metrics":
		c.metrics(w)
	case "GET /model_info", "GET /get_model_info":
		api.WriteJSON(w, http.StatusOK,
			python.Encode(map[string]any{"model_path": c.Host.Model, "is_generation": true}))
	default:
		return false
	}
	return true
}

// rendezvous are the members that both legs carry, each a value or a list of one value for each sequence.
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
	if c.Host.Extra["enable_metrics"] != "1" {
		api.WriteError(w, api.ErrNotFound())
		return
	}
	t := c.Core.Totals()
	text := fmt.Sprintf("# TYPE sglang:kv_transfer_total_mb histogram\n"+
		"sglang:kv_transfer_total_mb_count{model_name=%[1]q,tp_rank=\"0\"} %[2]d.0\n"+
		"sglang:kv_transfer_total_mb_sum{model_name=%[1]q,tp_rank=\"0\"} %[3]g\n"+
		"sglang:num_transfer_failed_reqs_total{model_name=%[1]q,tp_rank=\"0\"} %[4]d.0\n"+
		"sglang:prompt_tokens_total{model_name=%[1]q,tp_rank=\"0\"} %[5]d.0\n",
		c.Host.Model, t.Transfers, float64(t.BytesTransferred)/(1<<20), t.FailedTransfers, t.PromptTokens)
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write([]byte(text))
}

// errNoRoom is the error for a request without a room at an engine in a mode of disaggregation.
func errNoRoom() *api.Error {
	return api.BadRequest("bootstrap_room", "Disaggregated request received without bootstrap room id")
}

// withoutRooms wraps an API whose request model does not have the bootstrap members.
func (c *sglangDisagg) withoutRooms(parse api.Parser) api.Parser {
	return func(e *api.Engine, r *http.Request, body []byte) (*api.Call, *api.Error) {
		made, bad := parse(e, r, body)
		if bad == nil && c.disaggregated() {
			return nil, errNoRoom()
		}
		return made, bad
	}
}

// withRooms wraps an API so that each prompt of a call has its room. With n above 1 the samples of a prompt share it
// (managers/tokenizer_manager.py, _handle_batch_request): P has sent nothing for them and answers at once, and D waits
// until its own time-out ends.
func (c *sglangDisagg) withRooms(parse api.Parser) api.Parser {
	return func(e *api.Engine, r *http.Request, body []byte) (*api.Call, *api.Error) {
		made, bad := parse(e, r, body)
		if bad != nil || !c.disaggregated() {
			return made, bad
		}
		var q rendezvous
		if bad := api.DecodeBody(body, &q); bad != nil {
			return nil, bad
		}
		n := max(made.N, 1)
		prompts := len(made.Gens) / n
		rooms, ok := eachRoom(q.Room, prompts)
		if !ok {
			return nil, errNoRoom()
		}
		hosts, ok1 := each(q.Host, prompts)
		ports, ok2 := each(q.Port, prompts)
		if !ok1 || !ok2 {
			return nil, api.BadRequest("bootstrap_host", "bootstrap lists do not have the length of the batch")
		}
		for i, g := range made.Gens {
			g.Local = false
			g.Params = core.Params{"bootstrap_room": rooms[i/n], "bootstrap_host": hosts[i/n],
				"bootstrap_port": ports[i/n], "disagg_prefill_dp_rank": q.Rank, "routed_dp_rank": q.Routed,
				"data_parallel_rank": q.Alias}
		}
		if c.Host.Role == proto.RoleProducer {
			// P makes the first token and no more, and ends by length.
			made.OneToken()
			for _, g := range made.Gens {
				g.Stop, g.StopIDs = nil, nil
				if n > 1 {
					g.Params["bootstrap_room"] = nil
				}
			}
		}
		return made, nil
	}
}

// each returns a member's value for each prompt: the member is a list, or one value for all.
func each(raw json.RawMessage, prompts int) ([]json.RawMessage, bool) {
	if len(raw) == 0 || raw[0] != '[' {
		return slices.Repeat([]json.RawMessage{raw}, prompts), true
	}
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) < prompts {
		return nil, false
	}
	return list[:prompts], true
}

// eachRoom is each for rooms, which count up from one value.
func eachRoom(raw json.RawMessage, prompts int) ([]json.RawMessage, bool) {
	out, ok := each(raw, prompts)
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
