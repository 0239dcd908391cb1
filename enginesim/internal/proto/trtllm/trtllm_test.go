// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func trtllms(settings ...string) func(p, d *enginesim.Config) {
	return simtest.Of("trtllm", settings...)
}

const globalID = int64(1)<<62 + 12345

// legOf is a request with the parameters of one leg.
func legOf(body, params simtest.Obj) simtest.Obj {
	return simtest.With(body, simtest.Obj{"disaggregated_params": params})
}

// contextOnly runs the context leg and gives what D's leg is to carry.
func contextOnly(s *simtest.Scene, body simtest.Obj) (params simtest.Obj, tokens []any) {
	s.T.Helper()
	a := s.Ask(s.P, legOf(body, simtest.Obj{"request_type": "context_only", "disagg_request_id": globalID}))
	require.Equal(s.T, 200, a.Status, a.Body)
	require.NoError(s.T, json.Unmarshal([]byte(a.Get("choices.0.disaggregated_params").Raw), &params))
	require.NoError(s.T, json.Unmarshal([]byte(a.Get("prompt_token_ids").Raw), &tokens))
	params["request_type"], params["ctx_usage"] = "generation_only", json.RawMessage(a.Get("usage").Raw)
	params["ctx_request_id"], params["disagg_request_id"] = globalID, globalID // which obj has made floats of
	require.Len(s.T, params["first_gen_tokens"], 1)
	return params, tokens
}

// generation is D's leg of a completion.
func generation(body simtest.Obj, tokens []any, params simtest.Obj) simtest.Obj {
	return legOf(simtest.With(body, simtest.Obj{"prompt": tokens}), params)
}

func TestTRTLLMContextThenGeneration(t *testing.T) {
	for _, settings := range [][]string{nil, {"transceiver_runtime", "PYTHON"}} {
		for _, path := range []string{simtest.Completions, simtest.Chat} {
			s := simtest.New(t, trtllms(settings...))
			body, member := simtest.Request(path, "one", 24), "prompt"
			if path == simtest.Chat {
				member = "prompt_token_ids"
			}
			params, tokens := contextOnly(s, body)
			assert.EqualValues(t, 1, s.P.Stats().GenerationTokens,
				"the limit is not lowered, and yet it makes one token")
			d := s.Post(t.Context(), s.D, path, simtest.With(body,
				simtest.Obj{member: tokens, "disaggregated_params": params}))
			s.Right(body, d)
			assert.Equal(t, d.Get("usage.prompt_tokens").Int(), s.D.Stats().ExternalKVTransfer)
			assert.EqualValues(t, 0, d.Get("usage.prompt_tokens_details.cached_tokens").Int(),
				"as the context server had it")
			s.Clean()
		}
	}
}

func TestTRTLLMGivesOutTheFirstTokenItIsTold(t *testing.T) {
	s := simtest.New(t, trtllms())
	body := simtest.Completion("x")
	params, tokens := contextOnly(s, body)
	params["first_gen_tokens"] = []int{'@'}
	d := s.Ask(s.D, generation(body, tokens, params))
	require.Equal(t, 200, d.Status)
	assert.Equal(t, byte('@'), d.Text()[0])
}

func TestTRTLLMEndsAtTheContextServer(t *testing.T) {
	s := simtest.New(t, trtllms())
	body := simtest.With(simtest.Completion("x"), simtest.Obj{"stop": s.Alone(simtest.Completion("x"))[:1]})
	a := s.Ask(s.P, legOf(body, simtest.Obj{"request_type": "context_only", "disagg_request_id": globalID}))
	assert.Equal(t, "stop", a.Get("choices.0.finish_reason").String())
	assert.Zero(t, s.P.Stats().PinnedBlocks, "nothing is kept")
	assert.NoError(t, s.P.CheckKV())
}

func TestTRTLLMGenerationFirst(t *testing.T) {
	s := simtest.New(t, trtllms("transceiver_runtime", "PYTHON"))
	body := simtest.Completion("x")
	endpoint := s.Get(s.P, "/server_info").Get("disaggregated_params.ctx_info_endpoint.0").String()
	require.NotEmpty(t, endpoint)
	got := s.AskLater(s.D, legOf(body, simtest.Obj{"request_type": "generation_only",
		"ctx_request_id": globalID, "disagg_request_id": globalID, "schedule_style": 1,
		"ctx_info_endpoint": endpoint}))
	simtest.WaitFor(t, "D waits", func() bool { return s.D.Stats().Waiting == 1 })
	p := s.Ask(s.P, legOf(body, simtest.Obj{"request_type": "context_only",
		"disagg_request_id": globalID, "schedule_style": 1}))
	require.Equal(t, 200, p.Status)
	d := <-got
	s.Right(body, d)
	s.Clean()
}

func TestTRTLLMRefusesIncompleteParameters(t *testing.T) {
	s := simtest.New(t, trtllms())
	body := simtest.Completion("x")
	params, tokens := contextOnly(s, body)
	for rule, k := range map[string]struct {
		change func(simtest.Obj)
		status int
	}{
		"no ctx_request_id":   {simtest.Without("ctx_request_id"), 400},
		"no first_gen_tokens": {simtest.Without("first_gen_tokens"), 400},
		"unknown type":        {simtest.Set("request_type", "else"), 400},
		"a small id":          {simtest.Set("disagg_request_id", 7), 400},
		"a fraction":          {simtest.Set("disagg_request_id", 1.5), 400},
		"an unknown id":       {simtest.Set("disagg_request_id", globalID+1), 500},
		"no place":            {simtest.Without("encoded_opaque_state"), 500},
	} {
		changed := simtest.With(params, nil)
		k.change(changed)
		a := s.Ask(s.D, generation(body, tokens, changed))
		assert.Equal(t, k.status, a.Status, rule)
	}
	assert.Equal(t, 400, s.Ask(s.P, simtest.With(body, simtest.Obj{"n": 2, "temperature": 1,
		"disaggregated_params": simtest.Obj{"request_type": "context_only"}})).Status)
	assert.Equal(t, 400, s.Ask(s.P, simtest.With(body, simtest.Obj{"disaggregated_params": "x"})).Status)
	assert.Equal(t, 200, s.Ask(s.P, body).Status, "a request without is served alone")
}

// Both releases refuse parameters that they do not know; 1.2 knows no ctx_usage, and does not give it out.
func TestTRTLLMReleases(t *testing.T) {
	for version, status := range map[string]int{"": 200, "1.3": 200, "1.2": 400} {
		s := simtest.New(t, trtllms("version", version))
		body := simtest.Completion("x")
		params, tokens := contextOnly(s, body)
		leg := func(params simtest.Obj) simtest.Response {
			return s.Ask(s.D, generation(body, tokens, params))
		}
		assert.Equal(t, 400, leg(simtest.With(params, simtest.Obj{"else": 1})).Status)
		require.Equal(t, status, leg(params).Status, version)
		if status == 400 {
			delete(params, "ctx_usage")
			require.Equal(t, 200, leg(params).Status, version)
		}
		s.Clean()
	}
	_, err := enginesim.Start(enginesim.Config{Connector: "trtllm", Extra: map[string]string{"version": "1.1"}})
	require.ErrorContains(t, err, "version")
}

// A context server that does not tell disagg_request_id back keeps the KV under it all the same, as its own
// ctx_request_id.
func TestTRTLLMThatTellsNoID(t *testing.T) {
	s := simtest.New(t, trtllms("tells_no_id", "1"))
	body := simtest.Completion("x")
	params, tokens := contextOnly(s, body)
	delete(params, "disagg_request_id")
	d := s.Ask(s.D, generation(body, tokens, params))
	s.Right(body, d)
	s.Clean()
}

func TestTRTLLMSignatures(t *testing.T) {
	s := simtest.New(t, trtllms("internal_request_auth_key", "key"))
	body := simtest.Completion("x")
	params, tokens := contextOnly(s, body)
	leg := generation(body, tokens, params)
	mac := hmac.New(sha256.New, []byte("key"))
	mac.Write([]byte(`{"ctx_info_endpoint":null,"encoded_opaque_state":"` + params["encoded_opaque_state"].(string) +
		`"}`))
	good := "sha256=" + hex.EncodeToString(mac.Sum(nil))
	assert.Equal(t, 400, s.Ask(s.D, leg).Status)
	assert.Equal(t, 400, s.Ask(s.D, leg, "x-trtllm-disagg-auth", good+"0").Status)
	assert.Equal(t, 200, s.Ask(s.D, leg, "x-trtllm-disagg-auth", good).Status)
	s.Clean()
}

// KV that nobody reads is kept until the time-out; who waits for none gives up then.
func TestTRTLLMTimers(t *testing.T) {
	s := simtest.New(t, trtllms("kv_transfer_timeout_ms", "150"), func(p, _ *enginesim.Config) {
		p.Extra = map[string]string{"kv_transfer_timeout_ms": "2000"}
	})
	contextOnly(s, simtest.Completion("x"))
	assert.Positive(t, s.P.Stats().PinnedBlocks)
	simtest.WaitFor(t, "KV is let go", func() bool { return s.P.Stats().PinnedBlocks == 0 })
	assert.Equal(t, enginesim.KVLeak, simtest.FirstFault(t, s.P))
	begun := time.Now()
	a := s.Ask(s.D, simtest.With(simtest.Completion("x"),
		simtest.Obj{"disaggregated_params": simtest.Obj{"request_type": "generation_only", "ctx_request_id": 1,
			"schedule_style": 1, "encoded_opaque_state": s.Get(s.P,
				"/server_info").Get("disaggregated_params.encoded_opaque_state").String()}}))
	assert.Equal(t, 500, a.Status)
	assert.GreaterOrEqual(t, time.Since(begun), 150*time.Millisecond)
}

// GET /perf_metrics tells of each request once, and of the KV that came for it; only where the server was told to keep
// records.
func TestTRTLLMRecords(t *testing.T) {
	s := simtest.New(t, trtllms("perf_metrics_max_requests", "2"))
	body := simtest.Completion("x")
	params, tokens := contextOnly(s, body)
	for range 2 {
		require.Equal(t, 200, s.Ask(s.D, simtest.Completion("alone")).Status)
	}
	require.Equal(t, 200, s.Ask(s.D, generation(body, tokens, params)).Status)
	records := s.Get(s.D, "/perf_metrics")
	assert.EqualValues(t, 2, records.Get("#").Int(), "no more than asked for, the newest")
	assert.False(t, records.Get("0.perf_metrics.timing_metrics.kv_cache_size").Exists())
	assert.Equal(t, s.P.Stats().BytesTransferred, records.Get("1.perf_metrics.timing_metrics.kv_cache_size").Int())
	assert.Equal(t, "[]", s.Get(s.D, "/perf_metrics").Body, "given out once")
	assert.False(t, s.Get(s.P, "/perf_metrics").Get("0.perf_metrics.timing_metrics.kv_cache_size").Exists(),
		"P receives none")
	assert.Equal(t, "[]", s.Get(s.D, "/metrics").Body, "none of vLLM's counters")

	off := simtest.New(t, trtllms())
	require.Equal(t, 200, off.Ask(off.D, body).Status)
	assert.Equal(t, "[]", off.Get(off.D, "/perf_metrics").Body)
}
