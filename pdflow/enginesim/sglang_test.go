// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func sglangs(extra map[string]string) func(p, d *enginesim.Config) {
	return func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "sglang", "sglang"
		p.Extra, d.Extra = extra, extra
	}
}

const bootstrapTimeout, waitingTimeout = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"

// meeting are the bootstrap members for P.
func (s *scene) meeting(room any) obj {
	s.t.Helper()
	at, err := url.Parse(s.p.Bootstrap())
	require.NoError(s.t, err)
	var port int
	for _, c := range at.Port() {
		port = port*10 + int(c-'0')
	}
	return obj{"bootstrap_host": at.Hostname(), "bootstrap_port": port, "bootstrap_room": room}
}

// together sends both legs at once.
func (s *scene) together(path string, prefill, decode obj) (p, d answer) {
	s.t.Helper()
	waits := s.later(s.t.Context(), s.p, path, prefill)
	d = s.post(s.t.Context(), s.d, path, decode)
	return <-waits, d
}

func (s *scene) clean() {
	s.t.Helper()
	assert.NoError(s.t, s.p.WaitIdle(s.t.Context()))
	assert.NoError(s.t, s.d.WaitIdle(s.t.Context()))
	assert.NoError(s.t, s.p.CheckKV())
	assert.NoError(s.t, s.d.CheckKV())
	assert.Zero(s.t, s.p.Stats().PinnedBlocks)
}

// sglangAlone is an engine without disaggregation.
func sglangAlone(t *testing.T) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.Start(enginesim.Config{Connector: "sglang", BlockSize: block, MaxModelLen: 2048, Blocks: 256})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, e.Close()) })
	return e
}

func TestSGLangLegsMeetInTheirRoom(t *testing.T) {
	for _, path := range []string{completions, chat} {
		s := newScene(t, sglangs(nil))
		body := completion("one")
		if path == chat {
			body = obj{"model": "tiny", "messages": []obj{{"role": "user", "content": prompt(240, "one")}}, "max_tokens": 24, "temperature": 0}
		}
		legs := with(body, s.meeting(uint64(1)<<63-1))
		p, d := s.together(path, legs, legs)
		require.Equal(t, 200, p.status, p.body)
		require.Equal(t, 200, d.status, d.body)
		assert.Equal(t, s.alone(path, body), d.text())
		assert.EqualValues(t, 1, p.get("usage.completion_tokens").Int(), "P makes one token whatever the limit")
		assert.Equal(t, "length", p.get("choices.0.finish_reason").String())
		stats := s.d.Stats()
		assert.Equal(t, d.get("usage.prompt_tokens").Int(), stats.ExternalKVTransfer)
		assert.Zero(t, stats.LocalCompute)
		assert.Positive(t, s.p.Stats().BytesTransferred, "P writes")
		s.clean()
	}
}

func TestSGLangsOwnAPI(t *testing.T) {
	s := newScene(t, sglangs(nil))
	lone := sglangAlone(t)
	body := obj{"text": prompt(240, "g"), "sampling_params": obj{"max_new_tokens": 8, "temperature": 0}, "return_logprob": true, "logprob_start_len": 0}
	alone := s.post(t.Context(), lone, "/generate", body)
	require.Equal(t, 200, alone.status, alone.body)
	legs := with(body, s.meeting(7))
	p, d := s.together("/generate", legs, legs)
	require.Equal(t, 200, p.status, p.body)
	require.Equal(t, 200, d.status, d.body)
	assert.Equal(t, alone.get("text").String(), d.get("text").String())
	assert.Equal(t, "length", d.get("meta_info.finish_reason.type").String())
	assert.Len(t, alone.get("meta_info.input_token_logprobs").Array(), 240)
	assert.Equal(t, alone.get("meta_info.input_token_logprobs").Raw, p.get("meta_info.input_token_logprobs").Raw, "P has them")
	assert.Equal(t, "[]", d.get("meta_info.input_token_logprobs").Raw, "D has not")
	assert.Equal(t, alone.get("meta_info.output_token_logprobs").Raw, d.get("meta_info.output_token_logprobs").Raw)

	legs = with(legs, s.meeting(8))
	p, d = s.together("/generate", legs, with(legs, obj{"stream": true}))
	require.Equal(t, 200, p.status)
	events := d.events()
	require.Greater(t, len(events), 3)
	assert.Equal(t, "[DONE]", events[len(events)-1])
	last := gjson.Parse(events[len(events)-2])
	assert.Equal(t, alone.get("text").String(), last.Get("text").String(), "a stream's text is all so far")
	assert.Equal(t, "length", last.Get("meta_info.finish_reason.type").String())
	s.clean()
}

func TestSGLangBatchesHaveARoomEach(t *testing.T) {
	s := newScene(t, sglangs(nil))
	body := obj{"model": "tiny", "prompt": []string{prompt(100, "a"), prompt(70, "b")}, "max_tokens": 6, "n": 2, "seed": 5}
	alone := s.post(t.Context(), s.o, completions, body)
	require.Equal(t, 200, alone.status)
	m := s.meeting(nil)
	many := func(v any) []any { return []any{v, v, v, v} }
	legs := with(body, obj{"bootstrap_host": many(m["bootstrap_host"]), "bootstrap_port": many(m["bootstrap_port"]), "bootstrap_room": []int{4, 3, 2, 1}})
	p, d := s.together(completions, legs, legs)
	require.Equal(t, 200, p.status, p.body)
	require.Equal(t, 200, d.status, d.body)
	for _, i := range []string{"0", "1", "2", "3"} {
		assert.Equal(t, alone.get("choices."+i+".text").String(), d.get("choices."+i+".text").String())
	}
	p, d = s.together(completions, with(body, s.meeting(100)), with(body, s.meeting(100)))
	assert.Equal(t, 200, p.status, "one room counts up")
	assert.Equal(t, 200, d.status)

	for rule, rooms := range map[string]any{"too few": []int{1, 2, 3}, "a text": "1", "negative": -1, "null": nil, "a fraction": 1.5, "too large": uint64(1) << 63} {
		a := s.post(t.Context(), s.d, completions, with(body, s.meeting(rooms)))
		assert.Equal(t, 400, a.status, rule)
	}
	s.clean()
}

// An engine in a mode of disaggregation refuses what has no room.
func TestSGLangNeedsARoom(t *testing.T) {
	s := newScene(t, sglangs(nil))
	for _, e := range []*enginesim.Engine{s.p, s.d} {
		a := s.post(t.Context(), e, completions, completion("x"))
		assert.Equal(t, 400, a.status)
		assert.Contains(t, a.body, "without bootstrap room id")
	}
	assert.Equal(t, 200, s.post(t.Context(), sglangAlone(t), completions, completion("x")).status, "one without does not")
}

// P's answer comes after the transfer, so who waits for it before D is sent waits
// for the time-out.
func TestSGLangPrefillAloneTimesOut(t *testing.T) {
	s := newScene(t, sglangs(map[string]string{bootstrapTimeout: "0.2"}))
	begun := time.Now()
	a := s.post(t.Context(), s.p, completions, with(completion("x"), s.meeting(1)))
	assert.Equal(t, 500, a.status)
	assert.GreaterOrEqual(t, time.Since(begun), 200*time.Millisecond)
	s.clean()
}

func TestSGLangDecodeAloneTimesOut(t *testing.T) {
	s := newScene(t, sglangs(map[string]string{waitingTimeout: "0.2", bootstrapTimeout: "0.2"}))
	p, d := s.together(completions, with(completion("x"), s.meeting(1)), with(completion("x"), s.meeting(2)))
	assert.Equal(t, 500, p.status, "another room")
	assert.Equal(t, 500, d.status)
	s.clean()
	a := s.post(t.Context(), s.d, completions, with(completion("x"), obj{"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 3}))
	assert.Equal(t, 500, a.status, "nobody is there")
}

// D's leaving tells P, which ends with an error.
func TestSGLangDecodeThatLeavesEndsPrefill(t *testing.T) {
	s := newScene(t, sglangs(nil), func(p, _ *enginesim.Config) { p.PrefillRate = 400 })
	legs := with(completion("x"), s.meeting(1))
	leave := s.waits(legs)
	p := s.later(t.Context(), s.p, completions, legs)
	time.Sleep(100 * time.Millisecond)
	leave()
	assert.NotNil(t, <-p)
	s.clean()
}

func TestSGLangRoomsAreUsedOnce(t *testing.T) {
	s := newScene(t, sglangs(nil))
	legs := with(completion("x"), s.meeting(1))
	p, d := s.together(completions, legs, legs)
	require.Equal(t, 200, p.status)
	require.Equal(t, 200, d.status)
	require.NoError(t, s.p.WaitIdle(t.Context()))
	time.Sleep(20 * time.Millisecond)
	assert.Equal(t, 500, s.post(t.Context(), s.p, completions, legs).status, "a tombstone")
	assert.Equal(t, 500, s.post(t.Context(), s.d, completions, legs).status)

	legs = with(completion("x"), s.meeting(2))
	leave := s.waits(legs)
	assert.Equal(t, 500, s.post(t.Context(), s.d, completions, legs).status, "a second receiver is rejected")
	leave()

	legs = with(completion("x"), s.meeting(3))
	first := s.later(t.Context(), s.p, completions, legs)
	waitFor(t, "P waits", func() bool { return s.p.Stats().Requests == 3 })
	assert.Equal(t, 500, s.post(t.Context(), s.p, completions, legs).status, "two that live crash the scheduler")
	assert.Equal(t, 500, (<-first).status)
	s.dies(s.p)
}

// P's rank is the room modulo the ranks, unless the request names another: D looks
// where it believes P to be.
func TestSGLangRanksFollowTheRoom(t *testing.T) {
	s := newScene(t, sglangs(map[string]string{"dp_size": "4", waitingTimeout: "0.2", bootstrapTimeout: "0.2"}))
	meet := func(room int, more obj) obj { return with(with(completion("x"), s.meeting(room)), more) }
	p, d := s.together(completions, meet(7, nil), meet(7, obj{"disagg_prefill_dp_rank": 3}))
	assert.Equal(t, 200, p.status)
	assert.Equal(t, 200, d.status)
	p, d = s.together(completions, meet(8, nil), meet(8, obj{"disagg_prefill_dp_rank": 3}))
	assert.Equal(t, 500, p.status, "rank 0, not 3")
	assert.Equal(t, 500, d.status)
	p, d = s.together(completions, meet(9, obj{"routed_dp_rank": 2}), meet(9, nil))
	assert.Equal(t, 500, p.status, "rank 2, not 1")
	assert.Equal(t, 500, d.status)
}

func TestSGLangsOtherRoutes(t *testing.T) {
	s := newScene(t, sglangs(map[string]string{"dp_size": "2"}))
	assert.Equal(t, "prefill", s.get(s.p, "/server_info").get("disaggregation_mode").String())
	assert.Equal(t, "decode", s.get(s.d, "/server_info").get("disaggregation_mode").String())
	assert.Equal(t, 200, s.get(s.d, "/health_generate").status)
	assert.Equal(t, 200, s.get(s.d, "/model_info").status)
	assert.Empty(t, s.d.Bootstrap())
	at := s.p.Bootstrap()
	const arguments = "&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
	assert.Equal(t, "OK", s.fetch(at+"/health").body)
	assert.EqualValues(t, 2, s.fetch(at+"/route?prefill_dp_rank=-1"+arguments).get("dp_size").Int())
	assert.Positive(t, s.fetch(at+"/route?prefill_dp_rank=1"+arguments).get("rank_port").Int())
	assert.Equal(t, 404, s.fetch(at+"/route?prefill_dp_rank=2"+arguments).status)
	assert.Equal(t, 400, s.fetch(at+"/route").status)
	assert.Equal(t, 404, s.fetch(at+"/else").status)
	require.NoError(t, s.p.Restart())
	assert.Equal(t, at, s.p.Bootstrap(), "over a restart the port stays")
}

// GET /metrics is there only with --enable-metrics, in SGLang's own names: P tells what it has sent.
func TestSGLangTellsWhatItSent(t *testing.T) {
	s := newScene(t, sglangs(map[string]string{"enable_metrics": "1"}))
	body := completion("x")
	meeting := s.meeting(77)
	p, d := s.together(completions, with(body, meeting), with(body, meeting))
	require.Equal(t, []int{200, 200}, []int{p.status, d.status})
	page := s.get(s.p, "/metrics").body
	assert.Contains(t, page, `sglang:kv_transfer_total_mb_count{model_name="tiny",tp_rank="0"} 1.0`)
	assert.Contains(t, page, fmt.Sprintf("} %g\n", float64(s.p.Stats().BytesTransferred)/(1<<20)))
	assert.NotContains(t, page, "vllm:")
	assert.Contains(t, s.get(s.d, "/metrics").body, `sglang:kv_transfer_total_mb_count{model_name="tiny",tp_rank="0"} 0.0`)

	off := newScene(t, sglangs(nil))
	assert.Equal(t, 404, off.get(off.p, "/metrics").status)
}
