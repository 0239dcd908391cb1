// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
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
	return parseSGLang(c.host.role == RoleConsumer, body)
}

// serve answers what a router asks an engine beside requests.
func (c *sglangDisagg) serve(w http.ResponseWriter, r *http.Request, _ []byte) bool {
	mode := map[string]string{RoleProducer: "prefill", RoleConsumer: "decode", RoleBoth: "null"}[c.host.role]
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
		if c.host.role == RoleProducer {
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

// sglangRequest is SGLang's own API, as far as a proxy could notice.
type sglangRequest struct {
	RID       oneOrMany       `json:"rid"`
	Text      oneOrMany       `json:"text"`
	InputIDs  json.RawMessage `json:"input_ids"`
	Stream    bool            `json:"stream"`
	Logprob   json.RawMessage `json:"return_logprob"`
	LogFrom   *int            `json:"logprob_start_len"`
	Sampling  sglangSampling  `json:"sampling_params"`
	batch     bool
	returning bool
}

type sglangSampling struct {
	MaxTokens   *int      `json:"max_new_tokens"`
	MinTokens   int       `json:"min_new_tokens"`
	N           *int      `json:"n"`
	Temperature *float64  `json:"temperature"`
	Seed        *uint64   `json:"sampling_seed"`
	Stop        oneOrMany `json:"stop"`
	StopIDs     []int32   `json:"stop_token_ids"`
}

// parseSGLang reads a /generate request. remote says that the prompt is computed by another engine.
func parseSGLang(remote bool, body []byte) (*call, *apiError) {
	var q sglangRequest
	if bad := decodeBody(body, &q); bad != nil {
		return nil, bad
	}
	var members struct {
		Text json.RawMessage `json:"text"`
	}
	_ = json.Unmarshal(body, &members) // it has just been read
	var prompts [][]int32
	if len(q.InputIDs) > 0 && string(q.InputIDs) != "null" {
		var bad *apiError
		if prompts, bad = completionPrompts(q.InputIDs); bad != nil {
			return nil, bad
		}
		q.batch = strings.HasPrefix(strings.ReplaceAll(string(q.InputIDs), " ", ""), "[[")
	} else {
		for _, text := range q.Text {
			prompts = append(prompts, tokenise(text))
		}
		q.batch = len(members.Text) > 0 && members.Text[0] == '['
	}
	if len(prompts) == 0 {
		return nil, badRequest("text", "Either text, input_ids or input_embeds should be provided.")
	}
	s := &sampling{
		Stream: q.Stream, MaxTokens: q.Sampling.MaxTokens, MinTokens: q.Sampling.MinTokens, N: q.Sampling.N,
		Seed: q.Sampling.Seed, Stop: q.Sampling.Stop, StopTokenIDs: q.Sampling.StopIDs,
	}
	c, bad := newCall(s)
	if bad != nil {
		return nil, bad
	}
	c.limitName, c.defaultLimit = "max_new_tokens", 128
	c.greedy = c.n == 1 && q.Sampling.Temperature != nil && *q.Sampling.Temperature == 0
	for i, prompt := range prompts {
		id := randomHex(8)
		if i < len(q.RID) {
			id = q.RID[i]
		}
		c.add(s, id, prompt, false)
	}
	q.batch = q.batch || c.n > 1
	q.returning = strings.Contains(string(q.Logprob), "true")
	c.format = &sglangFormat{call: c, q: &q, prefilled: remote, begun: time.Now()}
	return c, nil
}

// sglangFormat writes answers of /generate. A stream's text is all so far.
type sglangFormat struct {
	call      *call
	q         *sglangRequest
	prefilled bool // the prompt is computed elsewhere, so nothing is known of its log probabilities
	begun     time.Time
	sse       *sse

	texts  []string
	tokens [][]int32
}

type sglangAnswer struct {
	Index  *int       `json:"index,omitempty"`
	Text   string     `json:"text"`
	Output []int32    `json:"output_ids"`
	Meta   sglangMeta `json:"meta_info"`
}

type sglangMeta struct {
	ID         string  `json:"id"`
	Finish     any     `json:"finish_reason"`
	Prompt     int     `json:"prompt_tokens"`
	Input      *[]any  `json:"input_token_logprobs,omitempty"`
	OutputLogs *[]any  `json:"output_token_logprobs,omitempty"`
	Completion int     `json:"completion_tokens"`
	Cached     int     `json:"cached_tokens"`
	Latency    float64 `json:"e2e_latency,omitempty"`
}

func (f *sglangFormat) answer(i int, text string, tokens []int32, cached int, reason string, stop any) *sglangAnswer {
	g := f.call.gens[i]
	a := &sglangAnswer{Text: text, Output: append([]int32{}, tokens...)}
	a.Meta = sglangMeta{ID: g.name, Prompt: len(g.prompt), Completion: len(tokens), Cached: cached}
	switch reason {
	case "":
	case reasonStop:
		a.Meta.Finish = map[string]any{"type": "stop", "matched": stop}
	case reasonLength:
		a.Meta.Finish = map[string]any{"type": "length", "length": len(tokens)}
	default:
		a.Meta.Finish = map[string]any{"type": "abort", "message": "Abort in waiting queue", "status_code": http.StatusInternalServerError}
	}
	if f.q.returning {
		input, output := f.input(g.prompt), []any{}
		for at, t := range tokens {
			output = append(output, []any{logprob(t, at), t, nil})
		}
		a.Meta.Input, a.Meta.OutputLogs = &input, &output
	}
	return a
}

// input are the log probabilities of the prompt from logprob_start_len on; the
// very first token has none.
func (f *sglangFormat) input(prompt []int32) []any {
	logs := []any{}
	if f.prefilled || f.q.LogFrom == nil || *f.q.LogFrom < 0 {
		return logs
	}
	for at := *f.q.LogFrom; at < len(prompt); at++ {
		var p any
		if at > 0 {
			p = logprob(prompt[at], at)
		}
		logs = append(logs, []any{p, prompt[at], nil})
	}
	return logs
}

func (f *sglangFormat) whole(outs []*outcome) any {
	list := make([]*sglangAnswer, len(outs))
	for i, o := range outs {
		list[i] = f.answer(i, o.text, o.tokens, o.cached, o.reason, o.stop)
		list[i].Meta.Latency = time.Since(f.begun).Seconds()
	}
	if !f.q.batch {
		return list[0]
	}
	return list
}

func (f *sglangFormat) begin(s *sse) {
	f.sse = s
	f.texts, f.tokens = make([]string, len(f.call.gens)), make([][]int32, len(f.call.gens))
}

func (f *sglangFormat) step(s step) {
	i := s.index
	f.texts[i] += s.text
	if s.hasOne {
		f.tokens[i] = append(f.tokens[i], s.token)
	}
	a := f.answer(i, f.texts[i], f.tokens[i], 0, s.reason, s.stop)
	if f.q.batch {
		a.Index = &i
	}
	f.sse.data(encode(a))
}

func (f *sglangFormat) end([]*outcome) { f.sse.data([]byte("[DONE]")) }
