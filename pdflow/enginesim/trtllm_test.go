// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func trtllms(extra map[string]string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "trtllm", "trtllm"
		p.Extra, d.Extra = extra, extra
	}
}

const globalID = int64(1)<<62 + 12345

// contextOnly runs the context leg and gives what D's leg is to carry.
func (s *scene) contextOnly(path string, body obj) (params obj, tokens []any) {
	s.t.Helper()
	a := s.post(s.t.Context(), s.p, path, with(body, obj{"stream": false, "disaggregated_params": obj{"request_type": "context_only", "disagg_request_id": globalID}}))
	require.Equal(s.t, 200, a.status, a.body)
	require.NoError(s.t, json.Unmarshal([]byte(a.get("choices.0.disaggregated_params").Raw), &params))
	require.NoError(s.t, json.Unmarshal([]byte(a.get("prompt_token_ids").Raw), &tokens))
	params["request_type"], params["ctx_usage"] = "generation_only", json.RawMessage(a.get("usage").Raw)
	params["ctx_request_id"], params["disagg_request_id"] = globalID, globalID // which obj has made floats of
	require.Len(s.t, params["first_gen_tokens"], 1)
	return params, tokens
}

func TestTRTLLMContextThenGeneration(t *testing.T) {
	for _, extra := range []map[string]string{nil, {"transceiver_runtime": "PYTHON"}} {
		for _, path := range []string{completions, chat} {
			s := newScene(t, trtllms(extra))
			body, member := completion("one"), "prompt"
			if path == chat {
				body, member = obj{"model": "tiny", "messages": []obj{{"role": "user", "content": prompt(240, "one")}}, "max_tokens": 24, "temperature": 0}, "prompt_token_ids"
			}
			params, tokens := s.contextOnly(path, body)
			assert.EqualValues(t, 1, s.p.Stats().GenerationTokens, "the limit is not lowered, and yet it makes one token")
			d := s.post(t.Context(), s.d, path, with(body, obj{member: tokens, "disaggregated_params": params}))
			require.Equal(t, 200, d.status, d.body)
			assert.Equal(t, s.alone(path, body), d.text())
			assert.Equal(t, d.get("usage.prompt_tokens").Int(), s.d.Stats().ExternalKVTransfer)
			assert.EqualValues(t, 0, d.get("usage.prompt_tokens_details.cached_tokens").Int(), "as the context server had it")
			s.clean()
		}
	}
}

func TestTRTLLMGivesOutTheFirstTokenItIsTold(t *testing.T) {
	s := newScene(t, trtllms(nil))
	body := completion("x")
	params, tokens := s.contextOnly(completions, body)
	params["first_gen_tokens"] = []int{'@'}
	d := s.post(t.Context(), s.d, completions, with(body, obj{"prompt": tokens, "disaggregated_params": params}))
	require.Equal(t, 200, d.status)
	assert.Equal(t, byte('@'), d.text()[0])
}

func TestTRTLLMEndsAtTheContextServer(t *testing.T) {
	s := newScene(t, trtllms(nil))
	body := with(completion("x"), obj{"stop": s.alone(completions, completion("x"))[:1]})
	a := s.post(t.Context(), s.p, completions, with(body, obj{"disaggregated_params": obj{"request_type": "context_only", "disagg_request_id": globalID}}))
	assert.Equal(t, "stop", a.get("choices.0.finish_reason").String())
	assert.Zero(t, s.p.Stats().PinnedBlocks, "nothing is kept")
	assert.NoError(t, s.p.CheckKV())
}

func TestTRTLLMGenerationFirst(t *testing.T) {
	s := newScene(t, trtllms(map[string]string{"transceiver_runtime": "PYTHON"}))
	body := completion("x")
	endpoint := s.get(s.p, "/server_info").get("disaggregated_params.ctx_info_endpoint.0").String()
	require.NotEmpty(t, endpoint)
	got := s.later(t.Context(), s.d, completions, with(body, obj{"disaggregated_params": obj{"request_type": "generation_only", "ctx_request_id": globalID, "disagg_request_id": globalID, "schedule_style": 1, "ctx_info_endpoint": endpoint}}))
	waitFor(t, "D waits", func() bool { return s.d.Stats().Waiting == 1 })
	p := s.post(t.Context(), s.p, completions, with(body, obj{"disaggregated_params": obj{"request_type": "context_only", "disagg_request_id": globalID, "schedule_style": 1}}))
	require.Equal(t, 200, p.status)
	d := <-got
	require.Equal(t, 200, d.status, d.body)
	assert.Equal(t, s.alone(completions, body), d.text())
	s.clean()
}

func TestTRTLLMRefusesIncompleteParameters(t *testing.T) {
	s := newScene(t, trtllms(nil))
	body := completion("x")
	params, tokens := s.contextOnly(completions, body)
	for rule, k := range map[string]struct {
		change func(obj)
		status int
	}{
		"no ctx_request_id":   {without("ctx_request_id"), 400},
		"no first_gen_tokens": {without("first_gen_tokens"), 400},
		"unknown type":        {set("request_type", "else"), 400},
		"a small id":          {set("disagg_request_id", 7), 400},
		"a fraction":          {set("disagg_request_id", 1.5), 400},
		"an unknown id":       {set("disagg_request_id", globalID+1), 500},
		"no place":            {without("encoded_opaque_state"), 500},
	} {
		changed := with(params, nil)
		k.change(changed)
		a := s.post(t.Context(), s.d, completions, with(body, obj{"prompt": tokens, "disaggregated_params": changed}))
		assert.Equal(t, k.status, a.status, rule)
	}
	assert.Equal(t, 400, s.post(t.Context(), s.p, completions, with(body, obj{"n": 2, "temperature": 1, "disaggregated_params": obj{"request_type": "context_only"}})).status)
	assert.Equal(t, 400, s.post(t.Context(), s.p, completions, with(body, obj{"disaggregated_params": "x"})).status)
	assert.Equal(t, 200, s.post(t.Context(), s.p, completions, body).status, "a request without is served alone")
}

func TestTRTLLMSignatures(t *testing.T) {
	s := newScene(t, trtllms(map[string]string{"internal_request_auth_key": "key"}))
	body := completion("x")
	params, tokens := s.contextOnly(completions, body)
	leg := with(body, obj{"prompt": tokens, "disaggregated_params": params})
	mac := hmac.New(sha256.New, []byte("key"))
	mac.Write([]byte(`{"ctx_info_endpoint":null,"encoded_opaque_state":"` + params["encoded_opaque_state"].(string) + `"}`))
	good := "sha256=" + hex.EncodeToString(mac.Sum(nil))
	assert.Equal(t, 400, s.post(t.Context(), s.d, completions, leg).status)
	assert.Equal(t, 400, s.post(t.Context(), s.d, completions, leg, "x-trtllm-disagg-auth", good+"0").status)
	assert.Equal(t, 200, s.post(t.Context(), s.d, completions, leg, "x-trtllm-disagg-auth", good).status)
	s.clean()
}

// KV that nobody reads is kept until the time-out; who waits for none gives up then.
func TestTRTLLMTimers(t *testing.T) {
	s := newScene(t, trtllms(map[string]string{"kv_transfer_timeout_ms": "150"}))
	s.contextOnly(completions, completion("x"))
	assert.Positive(t, s.p.Stats().PinnedBlocks)
	waitFor(t, "KV is let go", func() bool { return s.p.Stats().PinnedBlocks == 0 })
	assert.Equal(t, enginesim.KVLeak, firstFault(t, s.p))
	begun := time.Now()
	a := s.post(t.Context(), s.d, completions, with(completion("x"), obj{"disaggregated_params": obj{"request_type": "generation_only", "ctx_request_id": 1, "schedule_style": 1, "encoded_opaque_state": s.get(s.p, "/server_info").get("disaggregated_params.encoded_opaque_state").String()}}))
	assert.Equal(t, 500, a.status)
	assert.GreaterOrEqual(t, time.Since(begun), 150*time.Millisecond)
}

// GET /perf_metrics tells of each request once, and of the KV that came for it; only where the server was told to keep records.
func TestTRTLLMRecords(t *testing.T) {
	s := newScene(t, trtllms(map[string]string{"perf_metrics_max_requests": "2"}))
	body := completion("x")
	params, tokens := s.contextOnly(completions, body)
	for range 2 {
		require.Equal(t, 200, s.post(t.Context(), s.d, completions, completion("alone")).status)
	}
	require.Equal(t, 200, s.post(t.Context(), s.d, completions, with(body, obj{"prompt": tokens, "disaggregated_params": params})).status)
	records := s.get(s.d, "/perf_metrics")
	assert.EqualValues(t, 2, records.get("#").Int(), "no more than asked for, the newest")
	assert.False(t, records.get("0.perf_metrics.timing_metrics.kv_cache_size").Exists())
	assert.Equal(t, s.p.Stats().BytesTransferred, records.get("1.perf_metrics.timing_metrics.kv_cache_size").Int())
	assert.Equal(t, "[]", s.get(s.d, "/perf_metrics").body, "given out once")
	assert.False(t, s.get(s.p, "/perf_metrics").get("0.perf_metrics.timing_metrics.kv_cache_size").Exists(), "P receives none")
	assert.Equal(t, "[]", s.get(s.d, "/metrics").body, "none of vLLM's counters")

	off := newScene(t, trtllms(nil))
	require.Equal(t, 200, off.post(t.Context(), off.d, completions, body).status)
	assert.Equal(t, "[]", off.get(off.d, "/perf_metrics").body)
}
