// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
)

// memberOfThePrompt is a member of a response that tells of the prompt, in a request through a flow with the real
// connector. P's response and D's differ in it.
type memberOfThePrompt struct {
	row  string // what its row of docs/protocols/prompt-members.md begins with
	path string
	body string
	p, d string // what the engines answer, with DISAGG for what P hands over
	want string // what the client gets; "": D's response, byte for byte

	alone bool   // one engine serves the request: what it answers is want
	param string // 400 that names this member, and no engine is asked
	legs  string // what D's leg must have
}

const (
	nixlHandoff = `"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1]],` +
		`"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}`
	trtHandoff = `"disaggregated_params":{"request_type":"context_only","ctx_request_id":7,"first_gen_tokens":[278],` +
		`"first_gen_log_probs":[[-0.1]],"first_gen_logits":[[0.5]],"ctx_usage":null}`
	completions = "/v1/completions"
	chats       = "/v1/chat/completions"
	generates   = "/inference/v1/generate"
	sglangs     = "/generate"
)

var membersOfVLLM = []memberOfThePrompt{
	{row: "`usage`: cached tokens", path: completions, body: completion("hi", ""),
		p: `{"choices":[{"text":"p"}],"usage":{"prompt_tokens":90,"prompt_tokens_details":{"cached_tokens":7}},` +
			`DISAGG}`,
		d:    `{"choices":[{"text":"d"}],"usage":{"prompt_tokens":90,"prompt_tokens_details":{"cached_tokens":89}}}`,
		want: `{"choices":[{"text":"d"}],"usage":{"prompt_tokens":90,"prompt_tokens_details":{"cached_tokens":7}}}`},
	{row: "`choices[].routed_experts`", path: completions, body: completion("hi", ""),
		p:    `{"choices":[{"text":"p","routed_experts":` + chosen(expertsOfP) + `}],DISAGG}`,
		d:    `{"choices":[{"text":"d","routed_experts":` + chosen(garbage) + `}],"usage":{"completion_tokens":3}}`,
		want: `{"choices":[{"text":"d","routed_experts":` + chosen(together) + `}],"usage":{"completion_tokens":3}}`},
	{row: "`metrics.time_to_first_token_ms`", path: completions, body: completion("hi", ""),
		p:    `{"choices":[{"text":"p"}],"metrics":{"time_to_first_token_ms":100,"queue_time_ms":4},DISAGG}`,
		d:    `{"choices":[{"text":"d"}],"metrics":{"time_to_first_token_ms":20,"queue_time_ms":3}}`,
		want: `{"choices":[{"text":"d"}],"metrics":{"time_to_first_token_ms":120,"queue_time_ms":7}}`},
	{row: "the other `metrics`", path: completions, body: completion("hi", ""),
		p: `{"choices":[{"text":"p"}],"metrics":{"generation_time_ms":1,"mean_itl_ms":1},DISAGG}`,
		d: `{"choices":[{"text":"d"}],"metrics":{"generation_time_ms":9.5,"mean_itl_ms":2.5}}`},
	{row: "`prompt_logprobs`", path: chats, body: bodyOf(connector.APIChat, `"prompt_logprobs":1`),
		d:    `{"choices":[],"prompt_logprobs":"of one that found KV"}`,
		want: `{"choices":[],"prompt_logprobs":"of one that computed"}`, alone: true},
	{row: "`prompt_logprobs`", path: completions, body: completion("hi", `"echo":true,"logprobs":1`),
		d:    `{"choices":[{"text":"d","logprobs":"of one that found KV"}]}`,
		want: `{"choices":[{"text":"d","logprobs":"of one that computed"}]}`, alone: true},
	{row: "`prompt_logprobs`", path: generates,
		body: `{"token_ids":[1,2],"sampling_params":{"max_tokens":4,"prompt_logprob_token_ids":[[1]]}}`,
		d:    `{"choices":[{"token_ids":[7]}],"prompt_token_id_logprobs":"of one that found KV"}`,
		want: `{"choices":[{"token_ids":[7]}],"prompt_token_id_logprobs":"of one that computed"}`, alone: true},
	{row: "`prompt_token_ids`", path: completions, body: completion("hi", `"return_token_ids":true`),
		p: `{"prompt_token_ids":[1],"prompt_text":"p","mm_placeholders":{},"choices":[{"text":"p"}],DISAGG}`,
		d: `{"prompt_token_ids":[2],"prompt_text":"d","mm_placeholders":{"image":[1]},"choices":[{"text":"d"}]}`},
	{row: "`usage`: prompt tokens", path: completions, body: completion("hi", ""),
		p: `{"choices":[{"text":"p"}],"usage":{"prompt_tokens":1,"prompt_tokens_details":{"multimodal_tokens":1}},` +
			`DISAGG}`,
		d: `{"choices":[{"text":"d"}],"usage":{"prompt_tokens":2,"prompt_tokens_details":{"multimodal_tokens":2}}}`},
	{row: "`logprobs`, `token_ids`", path: completions, body: completion("hi", `"logprobs":1`),
		p: `{"choices":[{"text":"p","logprobs":1,"token_ids":[1],"sampling_mask":[1],"weight_versions":[1]}],DISAGG}`,
		d: `{"choices":[{"text":"d","logprobs":2,"token_ids":[2],"sampling_mask":[2],"weight_versions":[2]}]}`},
	{row: "`kv_transfer_params`", path: completions, body: completion("hi", ""), p: `{"choices":[{"text":"p"}],DISAGG}`,
		d: `{"choices":[{"text":"d"}],"kv_transfer_params":{"hidden_states_path":"/dev/shm/h",` +
			`"num_lmcache_cached_tokens":5}}`,
		want: `{"choices":[{"text":"d"}],"kv_transfer_params":{}}`},
	{row: "`kv_transfer_params`", path: completions, body: completion("hi", `"stream":true`),
		p: `{"choices":[{"text":"p"}],DISAGG}`,
		d: `data: {"choices":[{"text":"d"}],"kv_transfer_params":{"hidden_states_path":"/dev/shm/h",` +
			`"num_lmcache_cached_tokens":5}}` + "\n\ndata: [DONE]\n\n",
		want: `data: {"choices":[{"text":"d"}],"kv_transfer_params":{}}` + "\n\ndata: [DONE]\n\n"},
}

var membersOfSGLang = []memberOfThePrompt{
	{row: "`meta_info.input_token_logprobs`", path: sglangs,
		body: `{"text":"hi","return_logprob":true,"logprob_start_len":0,"sampling_params":{"max_new_tokens":4}}`,
		p: `{"text":"p","meta_info":{"input_token_logprobs":[[-1,1,null]],"input_top_logprobs":[null],` +
			`"input_token_ids_logprobs":[null],"output_token_logprobs":[[-5,5,null]]}}`,
		d: `{"text":"d","meta_info":{"input_token_logprobs":[],"input_top_logprobs":[],` +
			`"input_token_ids_logprobs":[],"output_token_logprobs":[[-6,6,null]]}}`,
		want: `{"text":"d","meta_info":{"input_token_logprobs":[[-1,1,null]],"input_top_logprobs":[null],` +
			`"input_token_ids_logprobs":[null],"output_token_logprobs":[[-6,6,null]]}}`},
	{row: "the same in another form", path: sglangs, body: `{"text":"hi","return_logprob":true,"logprob_start_len":0,` +
		`"return_flat_raw_top_logprobs":true}`, param: "return_flat_raw_top_logprobs"},
	{row: "the same in another form", path: chats, param: "logprob_start_len", body: bodyOf(connector.APIChat,
		`"logprobs":true,"logprob_start_len":0,"return_meta_info":true`)},
	{row: "`meta_info.routed_experts`", path: sglangs, body: `{"text":"hi","return_routed_experts":true}`,
		param: "return_routed_experts"},
	{row: "`meta_info.routed_experts`", path: chats, body: bodyOf(connector.APIChat, `"return_routed_experts":true`),
		param: "return_routed_experts"},
	{row: "`meta_info.hidden_states`", path: sglangs, body: `{"text":"hi","return_hidden_states":true}`,
		param: "return_hidden_states"},
	{row: "`meta_info.hidden_states`", path: completions, body: completion("hi", `"return_hidden_states":"last"`),
		param: "return_hidden_states"},
	{row: "the indexer's choices", path: sglangs, body: `{"text":"hi","return_indexer_topk":true}`,
		param: "return_indexer_topk"},
	{row: "`logprobs` of an `echo`", path: completions, body: completion("hi", `"echo":true,"logprobs":1`),
		param: "echo"},
	{row: "cached tokens", path: completions, body: completion("hi", `"return_cached_tokens_details":true`),
		p: `{"choices":[{"text":"p"}],"usage":{"prompt_tokens_details":{"cached_tokens":7}},"sgl_ext":null}`,
		d: `{"choices":[{"text":"d"}],"usage":{"prompt_tokens_details":{"cached_tokens":8}},` +
			`"sgl_ext":{"cached_tokens_details":{"device":8,"host":0}}}`},
	{row: "cached tokens", path: sglangs, body: `{"text":"hi"}`,
		p: `{"text":"p","meta_info":{"cached_tokens":7,"cached_tokens_details":{"device":7}}}`,
		d: `{"text":"d","meta_info":{"cached_tokens":8,"cached_tokens_details":{"device":8}}}`},
	{row: "the first token", path: sglangs, body: `{"text":"hi","return_logprob":true}`,
		p: `{"text":"p","output_ids":[1],"meta_info":{"output_token_logprobs":[[-5,5,null]]}}`,
		d: `{"text":"d","output_ids":[2],"meta_info":{"output_token_logprobs":[[-6,6,null]]}}`},
	{row: "`meta_info`: `e2e_latency`", path: sglangs, body: `{"text":"hi"}`,
		p: `{"text":"p","meta_info":{"e2e_latency":1.5,"queue_time":1,"first_token_latency":1}}`,
		d: `{"text":"d","meta_info":{"e2e_latency":2.5,"queue_time":2,"first_token_latency":2}}`},
	{row: "`prompt_token_ids`, `sgl_ext.input_ids`", path: sglangs,
		body: `{"text":"hi","return_prompt_token_ids":true}`,
		p:    `{"text":"p","prompt_token_ids":[1],"meta_info":{}}`,
		d:    `{"text":"d","prompt_token_ids":[2],"meta_info":{}}`},
	{row: "`prompt_token_ids`, `sgl_ext.input_ids`", path: chats,
		body: bodyOf(connector.APIChat, `"return_token_ids":true`),
		p:    `{"choices":[],"sgl_ext":{"input_ids":[1],"output_ids":[[1]]}}`,
		d:    `{"choices":[],"sgl_ext":{"input_ids":[2],"output_ids":[[2]]}}`},
}

var membersOfTensorRT = []memberOfThePrompt{
	{row: "`usage`: cached tokens", path: completions, body: completion("hi", ""),
		p: `{"choices":[{"text":"p","finish_reason":"length",DISAGG}],"usage":{"prompt_tokens":9,` +
			`"prompt_tokens_details":{"cached_tokens":7}}}`,
		d:    `{"choices":[{"text":"d"}],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":7}}}`,
		legs: `"ctx_usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":7}}`},
	{row: "the first token, its log probability and logits", path: completions, body: completion("hi", `"logprobs":1`),
		p:    `{"choices":[{"text":"p","logprobs":{"token_logprobs":[-0.3]},"finish_reason":"length",DISAGG}]}`,
		d:    `{"choices":[{"text":"d","logprobs":{"token_logprobs":[-0.1,-0.2]}}]}`,
		legs: `"first_gen_tokens":[278],"first_gen_log_probs":[[-0.1]],"first_gen_logits":[[0.5]]`},
	{row: "`choices[].context_logits`", path: completions, body: completion("hi", `"return_context_logits":true`),
		d:    `{"choices":[{"text":"d","context_logits":"of one that found KV"}]}`,
		want: `{"choices":[{"text":"d","context_logits":"of one that computed"}]}`, alone: true},
	{row: "`prompt_logprobs`", path: completions, body: completion("hi", `"prompt_logprobs":1`),
		d:    `{"choices":[{"text":"d","prompt_logprobs":"of one that found KV"}]}`,
		want: `{"choices":[{"text":"d","prompt_logprobs":"of one that computed"}]}`, alone: true},
	{row: "`prompt_token_ids`", path: completions, body: completion("hi", ""),
		p: `{"choices":[{"text":"p","finish_reason":"length",DISAGG}],"prompt_token_ids":[1,15043]}`,
		d: `{"choices":[{"text":"d"}],"prompt_token_ids":[1,15043]}`, legs: `"prompt":[1,15043]`},
	{row: "`avg_decoded_tokens_per_iter`", path: completions, body: completion("hi", ""),
		p: `{"choices":[{"text":"p","finish_reason":"length","avg_decoded_tokens_per_iter":1,DISAGG}]}`,
		d: `{"choices":[{"text":"d","avg_decoded_tokens_per_iter":2.5}]}`},
	{row: "`choices[].disaggregated_params`", path: completions, body: completion("hi", ""),
		p:    `{"choices":[{"text":"p","finish_reason":"length",DISAGG}]}`,
		d:    `{"choices":[{"text":"d","disaggregated_params":{"ctx_request_id":7,"encoded_opaque_state":"b64"}}]}`,
		want: `{"choices":[{"text":"d","disaggregated_params":{}}]}`},
}

// Each member of docs/protocols/prompt-members.md, through the engine's own connector: the client gets P's where only P
// knows it, D's where D does, what one engine alone has computed, or a refusal that names the request's member.
func TestEachMemberOfThePromptIsTrueOrRefused(t *testing.T) {
	for engine, k := range map[string]struct {
		typ, handoff string
		members      []memberOfThePrompt
	}{
		"vLLM":         {"nixl", nixlHandoff, membersOfVLLM},
		"SGLang":       {"sglang", "", membersOfSGLang},
		"TensorRT-LLM": {"trtllm", trtHandoff, membersOfTensorRT},
	} {
		for _, m := range k.members {
			t.Run(engine+", "+m.row+m.path+m.param, func(t *testing.T) {
				conn, err := connector.Open(config.Spec{Type: k.typ})
				require.NoError(t, err)
				var legs bodies
				x := script(t, conn, answer(strings.Replace(m.p, "DISAGG", k.handoff, 1)), legs.answer(
					func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
						said := m.d
						if m.alone && !strings.Contains(body, "_params\":{\"do_") &&
							!strings.Contains(body, "disaggregated_params") {
							said = m.want
						}
						sending(said, 0)(x, w, r, body)
					}))
				got := post(t, x.url, m.path, m.body)
				require.NoError(t, got.err)
				switch want := m.want; {
				case m.param != "":
					assert.Equal(t, http.StatusBadRequest, got.status)
					assert.Contains(t, got.body, `"param":"`+m.param+`"`)
					assert.Empty(t, x.all(), "no engine is asked")
				default:
					assert.Equal(t, http.StatusOK, got.status)
					if want == "" {
						assert.Equal(t, m.d, got.body)
					} else if strings.HasPrefix(want, "data:") {
						assert.Equal(t, want, got.body)
					} else {
						assert.JSONEq(t, want, got.body)
					}
					assert.Equal(t, m.alone, got.header.Get("X-PD-Mode") == "aggregated")
					assert.Equal(t, m.alone, x.all() == "D", "which engines are asked: %s", x.all())
					require.Len(t, legs.list, 1)
					assert.Contains(t, legs.list[0], m.legs)
				}
			})
		}
		t.Run(engine, func(t *testing.T) { eachRowIsPlayed(t, engine, k.members) })
	}
}

// eachRowIsPlayed holds an engine's table of the page against the cases: each row is played, and each member that it
// names stands in a body.
func eachRowIsPlayed(t *testing.T, engine string, members []memberOfThePrompt) {
	page, err := os.ReadFile("../docs/protocols/prompt-members.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(page), "\n## "+engine+"\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	name := regexp.MustCompile("`(?:meta_info\\.|choices\\[\\]\\.|sgl_ext\\.|metrics\\.)?([a-z0-9_]+)`")
	for line := range strings.Lines(section) {
		cells := strings.Split(line, "|")
		if len(cells) != 7 || strings.Contains(line, "---") || cells[5] == " test " {
			continue
		}
		row, all := strings.TrimSpace(cells[1]), ""
		for _, m := range members {
			if strings.HasPrefix(row, m.row) {
				all += m.body + m.p + m.d
			}
		}
		if strings.Contains(row, "pooled output") {
			continue // no flow has their paths
		}
		assert.NotEmpty(t, all, "the row is in no case: %s", row)
		for _, n := range name.FindAllStringSubmatch(row, -1) {
			assert.Contains(t, all, n[1], row)
		}
	}
}
