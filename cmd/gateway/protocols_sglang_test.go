// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// bootstrapPort is the attribute of a prefill engine of SGLang.
func bootstrapPort(p, _ *enginesim.Engine) (attributes, attributes) {
	return attributes{"bootstrapPort": bootstrapOf(p)}, nil
}

func bootstrapOf(p *enginesim.Engine) string {
	u, err := url.Parse(p.Bootstrap())
	if err != nil {
		return ""
	}
	return u.Port()
}

// records is a server of TensorRT-LLM that tells of its requests, which verify reads in place of counters.
func records(extra map[string]string) enginesim.Config {
	all := map[string]string{"perf_metrics_max_requests": "64"}
	maps.Copy(all, extra)
	return enginesim.Config{Extra: all}
}

func sglangProtocols() (rows []protocol) {
	ranked := func(p, d *enginesim.Engine) (attributes, attributes) {
		a, _ := bootstrapPort(p, d)
		a["dpSize"] = "4"
		return a, nil
	}
	impatient := map[string]string{"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "0.3",
		"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "0.3"}
	sglangAPIs := []connector.API{connector.APIChat, connector.APIResponses, connector.APIMessages}
	rows = append(rows,
		protocol{connector: "sglang", alone: true, attributes: bootstrapPort, apis: sglangAPIs,
			broken: map[string]broken{
				"P of another port": {func(_ *testing.T, c *protocol) {
					c.prefill.Extra, c.decode.Extra = impatient, impatient
					c.attributes = func(_, _ *enginesim.Engine) (attributes, attributes) {
						return attributes{"bootstrapPort": "9"}, nil
					}
				}, reuse.Failed, "engine"},
				"P without disaggregation": {func(_ *testing.T, c *protocol) {
					c.prefill.KVRole, c.prefill.Extra, c.decode.Extra = enginesim.RoleBoth, impatient, impatient
					c.attributes = nil
				}, reuse.Failed, "engine"},
				"D without disaggregation": {func(_ *testing.T, c *protocol) {
					c.decode.KVRole = enginesim.RoleBoth
				}, reuse.NotReused, "--disaggregation-mode decode"},
				// Both compute every prompt, all responses are 200, all texts are right.
				"neither with disaggregation": {func(_ *testing.T, c *protocol) {
					c.prefill.KVRole, c.decode.KVRole = enginesim.RoleBoth, enginesim.RoleBoth
					c.attributes = nil
				}, reuse.NotReused, "--disaggregation-mode decode"},
			}},
		protocol{connector: "sglang", name: "data parallel", config: `{prefillCap: false}`, alone: true,
			attributes: ranked, prefill: enginesim.Config{Extra: map[string]string{"dp_size": "4"}}},
		// P's rank does not follow from the room, so the request must name it.
		protocol{connector: "sglang", name: "round robin", alone: true, attributes: ranked, apis: sglangAPIs,
			prefill: enginesim.Config{Extra: map[string]string{"dp_size": "4", "load_balance_method": "round_robin",
				"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20"}},
			decode: enginesim.Config{Extra: map[string]string{"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20"}}},
		protocol{connector: "trtllm", decode: records(nil), broken: map[string]broken{
			"D without a connector": loneD,
			"P without a connector": loneP,
		}},
		// 1.2.1 refuses parameters that it does not know, such as ctx_usage.
		protocol{connector: "trtllm", name: "1.2.1",
			prefill: enginesim.Config{Extra: map[string]string{"version": "1.2"}},
			decode:  records(map[string]string{"version": "1.2"})},
		protocol{connector: "trtllm", name: "P tells no disagg_request_id",
			prefill: enginesim.Config{Extra: map[string]string{"version": "1.2", "tells_no_id": "1"}},
			decode:  records(map[string]string{"version": "1.2"})},
		protocol{connector: "trtllm", name: "signed", config: `{machineID: 5, authKey: the-key}`,
			prefill: enginesim.Config{Extra: map[string]string{"internal_request_auth_key": "the-key"}},
			decode:  records(map[string]string{"internal_request_auth_key": "the-key"}),
			broken: map[string]broken{
				"another key": {func(_ *testing.T, c *protocol) {
					c.decode.Extra = map[string]string{"internal_request_auth_key": "another"}
				}, reuse.Failed, "400"},
			}},
		protocol{connector: "trtllm", name: "generation first",
			config:  `{dispatch: generation-first, authKey: the-key}`,
			prefill: enginesim.Config{Extra: map[string]string{"transceiver_runtime": "PYTHON"}},
			decode: records(
				map[string]string{"transceiver_runtime": "PYTHON", "internal_request_auth_key": "the-key"},
			)},
	)
	return rows
}

// SGLang's own API, which no other engine has: one prompt and a list, whole and streamed, with the prompt's log
// probabilities put together of both engines'.
func TestSGLangsOwnAPI(t *testing.T) {
	c := protocol{connector: "sglang", attributes: bootstrapPort}
	x := c.start(t)
	lone := newSim(t, enginesim.Config{Connector: "sglang"})
	const rest = `,"sampling_params":{"max_new_tokens":12,"temperature":0},"return_logprob":true,` +
		`"logprob_start_len":0,"stream":`
	words := strings.Repeat("words of a prompt. ", 20)
	for _, body := range []string{`{"text":"one ` + words + `"` + rest, `{"text":["two ` + words + `","three ` + words +
		`"]` + rest} {
		_, _, want := do(t, http.MethodPost, lone.URL()+"/generate", body+`false}`)
		status, h, got := do(t, http.MethodPost, x.gateway.client+"/generate", body+`false}`)
		require.Equal(t, http.StatusOK, status, "%s\n%s", got, x.gateway.log)
		assert.Equal(t, "disaggregated", h.Get("X-PD-Mode"))
		assert.Equal(t, sglangResponses(gjson.Parse(want)), sglangResponses(gjson.Parse(got)))

		// Another prompt, since the engines keep the first.
		body = strings.Replace(body, `"one`, `"four`, 1)
		body = strings.Replace(body, `"two`, `"five`, 1)
		_, _, want = do(t, http.MethodPost, lone.URL()+"/generate", body+`false}`)
		status, _, got = do(t, http.MethodPost, x.gateway.client+"/generate", body+`true}`)
		require.Equal(t, http.StatusOK, status, got)
		last := map[int64]string{}
		for line := range strings.Lines(got) {
			if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: {"); ok {
				event := gjson.Parse("{" + data)
				last[event.Get("index").Int()] = sglangResponses(event)[0]
			}
		}
		for i, response := range sglangResponses(gjson.Parse(want)) {
			assert.Equal(t, response, last[int64(i)])
		}
		assert.Contains(t, got, "data: [DONE]")
	}
	x.clean(t)
}

// SGLang's engines give all samples of a prompt one room, so that D waits until its time-out (300 s). Such a request
// is refused at once, or served by one engine where the policy says so and an engine of role both is there.
func TestSGLangWithSeveralSamples(t *testing.T) {
	requests := map[string]string{
		"/v1/completions":      `{"model":"tiny","prompt":"a","max_tokens":4,"n":2}`,
		"/v1/chat/completions": `{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":4,"n":2}`,
		"/generate":            `{"text":"a","sampling_params":{"max_new_tokens":4,"n":2}}`,
	}
	c := protocol{connector: "sglang", attributes: bootstrapPort}
	x := c.start(t)
	for path, request := range requests {
		begun := time.Now()
		status, _, got := do(t, http.MethodPost, x.gateway.client+path, request)
		assert.Equal(t, http.StatusBadRequest, status, "%s: %s", path, got)
		assert.Contains(t, got, `"param":"n"`)
		assert.Less(t, time.Since(begun), 20*time.Second)
	}
	status, _, got := do(t, http.MethodPost, x.gateway.client+"/generate",
		`{"text":["a","b"],"sampling_params":[{"n":2},{"n":2}]}`)
	assert.Equal(t, http.StatusBadRequest, status, got)
	assert.Zero(t, x.p.Stats().Requests+x.d.Stats().Requests, "neither engine got one")

	g := start(t, gatewayYAML("")+serverYAML("tiny", "  kvConnector: {type: sglang, unsupported: aggregate}\n",
		entry(x.p.URL(), "prefill", attributes{"bootstrapPort": bootstrapOf(x.p)}), as("decode", x.d),
		as("both", x.alone)))
	for path, request := range requests {
		status, h, got := do(t, http.MethodPost, g.client+path, request)
		assert.Equal(t, http.StatusOK, status, "%s: %s", path, got)
		assert.Equal(t, "aggregated", h.Get("X-PD-Mode"))
	}
	assert.Zero(t, x.p.Stats().Requests+x.d.Stats().Requests, "only the engine of role both can serve it")
}

// Engines older than 0.5.20 (responses) and 0.5.22 (messages) refuse, and the client sees their own words.
func TestAnOlderSGLangRefusesByItself(t *testing.T) {
	old := enginesim.Config{Extra: map[string]string{"pd_routing_fields": "0"}}
	c := protocol{connector: "sglang", attributes: bootstrapPort, prefill: old, decode: old}
	x := c.start(t)
	for _, api := range []connector.API{connector.APIResponses, connector.APIMessages} {
		for _, stream := range []bool{false, true} {
			status, _, got := do(t, http.MethodPost, x.gateway.client+api.Path(), body(api, 1, stream))
			assert.Equal(t, http.StatusBadRequest, status, "%s: %s", api, got)
			assert.Contains(t, got, "without bootstrap room id")
		}
	}
}

// sglangResponses are the parts of each response that must be equal: text, finish reason, log probabilities.
func sglangResponses(whole gjson.Result) []string {
	var out []string
	responses := []gjson.Result{whole}
	if whole.IsArray() {
		responses = whole.Array()
	}
	for _, a := range responses {
		out = append(out, a.Get("text").Raw+a.Get("meta_info.finish_reason").Raw+
			a.Get("meta_info.input_token_logprobs").Raw+a.Get("meta_info.output_token_logprobs").Raw)
	}
	return out
}

// A finished response of TensorRT-LLM's context server reaches clients as their own, streamed or not.
func TestAResponseThatEndsAtTheContextServer(t *testing.T) {
	c := protocol{connector: "trtllm"}
	x := c.start(t)
	for i, stream := range []string{"false", "true"} {
		prompt := strings.Repeat("ends at once "+stream+" ", 20)
		_, _, first := do(t, http.MethodPost, x.alone.URL()+"/v1/completions", `{"model":"tiny","prompt":"`+prompt+
			`","max_tokens":1,"temperature":0}`)
		stop := gjson.Get(first, "choices.0.text").Raw
		request := `{"model":"tiny","prompt":"` + prompt + `","max_tokens":8,"temperature":0,"stop":` + stop +
			`,"include_stop_str_in_output":true,"stream":` + stream
		if i == 1 {
			request += `,"stream_options":{"include_usage":true}`
		}
		status, _, got := x.gateway.complete(request + "}")
		require.Equal(t, http.StatusOK, status, "%s\n%s", got, x.gateway.log)
		assert.Contains(t, got, `"finish_reason":"stop"`)
		assert.NotContains(t, got, "disaggregated_params")
		if i == 1 {
			assert.Equal(t, 3, strings.Count(got, "data: "), "a chunk, the usage, the end: %s", got)
			assert.True(t, strings.HasSuffix(strings.TrimSpace(got), "data: [DONE]"))
		}
	}
	assert.Zero(t, x.d.Stats().Requests, "decode was not asked")
	assert.NoError(t, x.p.CheckKV())
}

// Many requests at once, lists among them: no two meet in one room, or under one id.
func TestRoomsAndIDsOfManyAtOnce(t *testing.T) {
	for _, c := range []protocol{{connector: "sglang", attributes: bootstrapPort}, {connector: "trtllm"},
		{connector: "trtllm", config: `{dispatch: generation-first}`,
			prefill: enginesim.Config{Extra: map[string]string{"transceiver_runtime": "PYTHON"}}}} {
		x := c.start(t)
		var all sync.WaitGroup
		for i := range 40 {
			all.Go(func() {
				prompt := fmt.Sprintf("%q", strings.Repeat(fmt.Sprintf("%d at once ", i), 20))
				if c.connector == "sglang" && i%2 == 0 {
					prompt = fmt.Sprintf("[%s,%q]", prompt, strings.Repeat(fmt.Sprintf("%d more ", i), 20))
				}
				request := fmt.Sprintf(`{"model":"tiny","prompt":%s,"max_tokens":6,"temperature":0,"stream":%t}`,
					prompt, i%3 == 0)
				status, _, got := x.gateway.complete(request)
				_, _, want := do(t, http.MethodPost, x.alone.URL()+"/v1/completions", request)
				assert.Equal(t, http.StatusOK, status, got)
				assert.Len(t, texts(t, got), len(texts(t, want)))
				if !strings.HasPrefix(prompt, "[") { // events of a list come in any order
					assert.Equal(t, texts(t, want), texts(t, got))
				}
			})
		}
		all.Wait()
		x.clean(t)
	}
}
