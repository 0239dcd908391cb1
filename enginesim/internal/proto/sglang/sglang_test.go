// SPDX-License-Identifier: Apache-2.0

package sglang_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sglangs(settings ...string) func(p, d *enginesim.Config) {
	return simtest.Of("sglang", settings...)
}

const (
	bootstrapTimeout = "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"
	waitingTimeout   = "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"
)

// rendezvous holds the bootstrap members for P.
func rendezvous(s *simtest.Scene, room any) simtest.Obj {
	s.T.Helper()
	at, err := url.Parse(s.P.Bootstrap())
	require.NoError(s.T, err)
	return simtest.Obj{"bootstrap_host": at.Hostname(), "bootstrap_port": json.RawMessage(at.Port()),
		"bootstrap_room": room}
}

// twoRooms holds lists of bootstrap members.
func twoRooms(s *simtest.Scene, rooms ...int) simtest.Obj {
	m := rendezvous(s, rooms)
	for _, name := range []string{"bootstrap_host", "bootstrap_port"} {
		m[name] = []any{m[name], m[name]}
	}
	return m
}

// together sends both legs at once.
func together(s *simtest.Scene, path string, prefill, decode simtest.Obj) (p, d simtest.Response) {
	s.T.Helper()
	waits := s.Later(s.T.Context(), s.P, path, prefill)
	d = s.Post(s.T.Context(), s.D, path, decode)
	return <-waits, d
}

// sglangAlone is an engine without disaggregation.
func sglangAlone(t *testing.T) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.Start(enginesim.Config{Connector: "sglang", BlockSize: simtest.Block, MaxModelLen: 2048,
		Blocks: 256})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, e.Close()) })
	return e
}

func TestSGLangLegsMeetInTheirRoom(t *testing.T) {
	for _, path := range []string{simtest.Completions, simtest.Chat} {
		s := simtest.New(t, sglangs())
		body := simtest.Request(path, "one", 24)
		legs := simtest.With(body, rendezvous(s, uint64(1)<<63-1))
		p, d := together(s, path, legs, legs)
		require.Equal(t, 200, p.Status, p.Body)
		s.Right(body, d)
		assert.EqualValues(t, 1, p.Get("usage.completion_tokens").Int(), "P makes one token whatever the limit")
		assert.Equal(t, "length", p.Get("choices.0.finish_reason").String())
		stats := s.D.Stats()
		assert.Equal(t, d.Get("usage.prompt_tokens").Int(), stats.ExternalKVTransfer)
		assert.Zero(t, stats.LocalCompute)
		assert.Positive(t, s.P.Stats().BytesTransferred, "P writes")
		s.Clean()
	}
}

func TestSGLangsOwnAPI(t *testing.T) {
	s := simtest.New(t, sglangs())
	lone := sglangAlone(t)
	body := simtest.Obj{"text": simtest.Prompt(240, "g"), "return_logprob": true, "logprob_start_len": 0,
		"sampling_params": simtest.Obj{"max_new_tokens": 8, "temperature": 0}}
	alone := s.Post(t.Context(), lone, "/generate", body)
	require.Equal(t, 200, alone.Status, alone.Body)
	legs := simtest.With(body, rendezvous(s, 7))
	p, d := together(s, "/generate", legs, legs)
	require.Equal(t, 200, p.Status, p.Body)
	require.Equal(t, 200, d.Status, d.Body)
	assert.Equal(t, alone.Get("text").String(), d.Get("text").String())
	assert.Equal(t, "length", d.Get("meta_info.finish_reason.type").String())
	assert.Len(t, alone.Get("meta_info.input_token_logprobs").Array(), 240)
	assert.Equal(t, alone.Get("meta_info.input_token_logprobs").Raw, p.Get("meta_info.input_token_logprobs").Raw,
		"P has them")
	assert.Equal(t, "[]", d.Get("meta_info.input_token_logprobs").Raw, "D has not")
	assert.Equal(t, alone.Get("meta_info.output_token_logprobs").Raw, d.Get("meta_info.output_token_logprobs").Raw)

	legs = simtest.With(legs, rendezvous(s, 8))
	p, d = together(s, "/generate", legs, simtest.Streamed(legs))
	require.Equal(t, 200, p.Status)
	events := d.Events()
	require.Greater(t, len(events), 3)
	assert.Equal(t, "[DONE]", events[len(events)-1])
	last := gjson.Parse(events[len(events)-2])
	assert.Equal(t, alone.Get("text").String(), last.Get("text").String(), "a stream's text is all so far")
	assert.Equal(t, "length", last.Get("meta_info.finish_reason.type").String())
	s.Clean()
}

func TestSGLangBatchesHaveARoomEach(t *testing.T) {
	s := simtest.New(t, sglangs())
	body := simtest.Obj{"model": "tiny", "prompt": []string{simtest.Prompt(100, "a"), simtest.Prompt(70, "b")},
		"max_tokens": 6, "seed": 5}
	alone := s.Ask(s.O, body)
	require.Equal(t, 200, alone.Status)
	legs := simtest.With(body, twoRooms(s, 4, 3))
	p, d := together(s, simtest.Completions, legs, legs)
	require.Equal(t, 200, p.Status, p.Body)
	require.Equal(t, 200, d.Status, d.Body)
	for _, i := range []string{"0", "1"} {
		assert.Equal(t, alone.Get("choices."+i+".text").String(), d.Get("choices."+i+".text").String())
	}
	legs = simtest.With(body, rendezvous(s, 100))
	p, d = together(s, simtest.Completions, legs, legs)
	assert.Equal(t, 200, p.Status, "one room counts up")
	assert.Equal(t, 200, d.Status)

	for rule, rooms := range map[string]any{"too few": []int{1}, "a text": "1", "negative": -1, "null": nil,
		"a fraction": 1.5, "too large": uint64(1) << 63} {
		a := s.Ask(s.D, simtest.With(body, rendezvous(s, rooms)))
		assert.Equal(t, 400, a.Status, rule)
	}
	s.Clean()
}

// With n above 1 all samples of a prompt get its first room, whatever rooms the request has: P answers at once and
// sends nothing, and D waits until its time-out.
func TestSGLangHangsWithSeveralSamples(t *testing.T) {
	s := simtest.New(t, sglangs(waitingTimeout, "0.3"))
	one := simtest.Obj{"model": "tiny", "prompt": simtest.Prompt(100, "a"), "max_tokens": 6, "seed": 5, "n": 2}
	for _, rooms := range []simtest.Obj{rendezvous(s, 7), twoRooms(s, 8, 9)} {
		begun := time.Now()
		assert.Equal(t, 200, s.Ask(s.P, simtest.With(one, rooms)).Status)
		d := s.Ask(s.D, simtest.With(one, rooms))
		assert.Equal(t, 500, d.Status, d.Body)
		assert.GreaterOrEqual(t, time.Since(begun), 300*time.Millisecond)
	}
	s.Clean()
}

// /v1/responses and /v1/messages read the bootstrap members; older engines have no such members there, and refuse.
func TestSGLangsResponsesAndMessages(t *testing.T) {
	s := simtest.New(t, sglangs(waitingTimeout, "30", bootstrapTimeout, "30"))
	messages, responses := simtest.Request("/v1/messages", "m", 12), simtest.Request("/v1/responses", "r", 12)
	for i, k := range []struct {
		path   string
		body   simtest.Obj
		tokens int64
	}{{"/v1/messages", messages, 12}, {"/v1/responses", responses, 10}} {
		legs := simtest.With(k.body, rendezvous(s, 2*i+1))
		p, d := together(s, k.path, legs, legs)
		require.Equal(t, 200, p.Status, p.Body)
		require.Equal(t, 200, d.Status, d.Body)
		assert.EqualValues(t, 1, p.Get("usage.output_tokens").Int(), "P makes one token whatever the limit")
		assert.Equal(t, k.tokens, d.Get("usage.output_tokens").Int(), k.path)
		assert.Zero(t, s.D.Stats().LocalCompute)

		legs = simtest.With(k.body, rendezvous(s, 2*i+2))
		_, d = together(s, k.path, legs, simtest.Streamed(legs))
		require.Equal(t, 200, d.Status, d.Body)
		assert.NotContains(t, d.Body, "[DONE]")
		assert.Equal(t, 400, s.Post(t.Context(), s.D, k.path, k.body).Status, "without a room")
	}
	refused := s.Post(t.Context(), s.P, "/v1/messages", messages)
	assert.Equal(t, "error", refused.Get("type").String(), refused.Body)
	assert.Equal(t, "invalid_request_error", refused.Get("error.type").String())
	legs := simtest.With(responses, simtest.Obj{"max_output_tokens": 1}, rendezvous(s, 9))
	assert.Equal(t, 400, s.Post(t.Context(), s.P, "/v1/responses", legs).Status, "two tokens off one")
	s.Clean()

	old := simtest.New(t, sglangs("pd_routing_fields", "0"))
	for path, body := range map[string]simtest.Obj{"/v1/messages": messages, "/v1/responses": responses} {
		a := old.Post(t.Context(), old.P, path, simtest.With(body, rendezvous(old, 1)))
		assert.Equal(t, 400, a.Status, path)
		assert.Contains(t, a.Body, "without bootstrap room id")
	}
}

// An engine in a mode of disaggregation refuses what has no room.
func TestSGLangNeedsARoom(t *testing.T) {
	s := simtest.New(t, sglangs())
	for _, e := range []*enginesim.Engine{s.P, s.D} {
		a := s.Ask(e, simtest.Completion("x"))
		assert.Equal(t, 400, a.Status)
		assert.Contains(t, a.Body, "without bootstrap room id")
	}
	assert.Equal(t, 200, s.Ask(sglangAlone(t), simtest.Completion("x")).Status, "one without does not")
}

// P's response comes after the transfer, so who waits for it before D is sent waits for the time-out.
func TestSGLangPrefillAloneTimesOut(t *testing.T) {
	s := simtest.New(t, sglangs(bootstrapTimeout, "0.2"))
	begun := time.Now()
	a := s.Ask(s.P, simtest.With(simtest.Completion("x"), rendezvous(s, 1)))
	assert.Equal(t, 500, a.Status)
	assert.GreaterOrEqual(t, time.Since(begun), 200*time.Millisecond)
	s.Clean()
}

func TestSGLangDecodeAloneTimesOut(t *testing.T) {
	s := simtest.New(t, sglangs(waitingTimeout, "0.2", bootstrapTimeout, "0.2"))
	p, d := together(s, simtest.Completions, simtest.With(simtest.Completion("x"), rendezvous(s, 1)),
		simtest.With(simtest.Completion("x"), rendezvous(s, 2)))
	assert.Equal(t, 500, p.Status, "another room")
	assert.Equal(t, 500, d.Status)
	s.Clean()
	a := s.Ask(s.D, simtest.With(simtest.Completion("x"),
		simtest.Obj{"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 3}))
	assert.Equal(t, 500, a.Status, "nobody is there")
}

// D's leaving tells P, which ends with an error.
func TestSGLangDecodeThatLeavesEndsPrefill(t *testing.T) {
	s := simtest.New(t, sglangs(), func(p, _ *enginesim.Config) { p.PrefillRate = 80 })
	legs := simtest.With(simtest.Completion("x"), rendezvous(s, 1))
	leave := s.Waits(legs)
	p := s.AskLater(s.P, legs)
	time.Sleep(100 * time.Millisecond)
	leave()
	assert.NotNil(t, <-p)
	s.Clean()
}

func TestSGLangRoomsAreUsedOnce(t *testing.T) {
	s := simtest.New(t, sglangs(), simtest.OwnPorts(t))
	legs := simtest.With(simtest.Completion("x"), rendezvous(s, 1))
	p, d := together(s, simtest.Completions, legs, legs)
	require.Equal(t, 200, p.Status)
	require.Equal(t, 200, d.Status)
	require.NoError(t, s.P.WaitIdle(t.Context()))
	time.Sleep(time.Second) // P leaves the room after it has answered
	assert.Equal(t, 500, s.Ask(s.P, legs).Status, "a tombstone")
	assert.Equal(t, 500, s.Ask(s.D, legs).Status)

	legs = simtest.With(simtest.Completion("x"), rendezvous(s, 2))
	leave := s.Waits(legs)
	time.Sleep(time.Second) // it has entered, which P does not show
	assert.Equal(t, 500, s.Ask(s.D, legs).Status, "a second receiver is rejected")
	leave()

	legs = simtest.With(simtest.Completion("x"), rendezvous(s, 3))
	first := s.AskLater(s.P, legs)
	simtest.WaitFor(t, "P waits", func() bool { return s.P.Stats().Requests == 3 })
	assert.Equal(t, 500, s.Ask(s.P, legs).Status, "two that live crash the scheduler")
	assert.Equal(t, 500, (<-first).Status)
	s.Dies(s.P)
}

// P's rank is the room modulo the ranks, unless the request names another: D looks where it believes P to be.
func TestSGLangRanksFollowTheRoom(t *testing.T) {
	s := simtest.New(t, sglangs("dp_size", "4"))
	meet := func(room int, more simtest.Obj) simtest.Obj {
		return simtest.With(simtest.Completion("x"), rendezvous(s, room), more)
	}
	p, d := together(s, simtest.Completions, meet(7, nil), meet(7, simtest.Obj{"disagg_prefill_dp_rank": 3}))
	assert.Equal(t, 200, p.Status)
	assert.Equal(t, 200, d.Status)
	s = simtest.New(t, sglangs("dp_size", "4", waitingTimeout, "0.2", bootstrapTimeout, "0.2"))
	p, d = together(s, simtest.Completions, meet(8, nil), meet(8, simtest.Obj{"disagg_prefill_dp_rank": 3}))
	assert.Equal(t, 500, p.Status, "rank 0, not 3")
	assert.Equal(t, 500, d.Status)
	p, d = together(s, simtest.Completions, meet(9, simtest.Obj{"routed_dp_rank": 2}), meet(9, nil))
	assert.Equal(t, 500, p.Status, "rank 2, not 1")
	assert.Equal(t, 500, d.Status)
}

// With round_robin P's rank follows from nothing in the request, unless the request names it.
func TestSGLangRanksByRoundRobin(t *testing.T) {
	s := simtest.New(t, sglangs("dp_size", "4", "load_balance_method", "round_robin", waitingTimeout, "0.2",
		bootstrapTimeout, "0.2"))
	legs := simtest.With(simtest.Completion("x"), rendezvous(s, 7))
	told := simtest.With(legs, simtest.Obj{"disagg_prefill_dp_rank": 3})
	p, d := together(s, simtest.Completions, legs, told)
	assert.Equal(t, []int{500, 500}, []int{p.Status, d.Status}, "rank 1, not 3")
	s.Clean()
	s = simtest.New(t, sglangs("dp_size", "4", "load_balance_method", "round_robin"))
	legs, told = simtest.With(legs, rendezvous(s, 11)), simtest.With(told, rendezvous(s, 11))
	p, d = together(s, simtest.Completions, simtest.With(legs, simtest.Obj{"routed_dp_rank": 3}), told)
	assert.Equal(t, []int{200, 200}, []int{p.Status, d.Status})
	s.Clean()
}

func TestSGLangsOtherRoutes(t *testing.T) {
	s := simtest.New(t, sglangs("dp_size", "2"),
		simtest.OwnPorts(t, "disaggregation_bootstrap_port"))
	assert.Equal(t, "prefill", s.Get(s.P, "/server_info").Get("disaggregation_mode").String())
	assert.Equal(t, "decode", s.Get(s.D, "/server_info").Get("disaggregation_mode").String())
	assert.Equal(t, 200, s.Get(s.D, "/health_generate").Status)
	assert.Equal(t, 200, s.Get(s.D, "/model_info").Status)
	assert.Empty(t, s.D.Bootstrap())
	at := s.P.Bootstrap()
	const arguments = "&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
	assert.Equal(t, "OK", s.Fetch(at+"/health").Body)
	assert.EqualValues(t, 2, s.Fetch(at+"/route?prefill_dp_rank=-1"+arguments).Get("dp_size").Int())
	assert.Positive(t, s.Fetch(at+"/route?prefill_dp_rank=1"+arguments).Get("rank_port").Int())
	assert.Equal(t, 404, s.Fetch(at+"/route?prefill_dp_rank=2"+arguments).Status)
	assert.Equal(t, 400, s.Fetch(at+"/route").Status)
	assert.Equal(t, 404, s.Fetch(at+"/else").Status)
	require.NoError(t, s.P.Restart())
	assert.Equal(t, at, s.P.Bootstrap(), "over a restart the port stays")
}

// GET /metrics is there only with --enable-metrics, in SGLang's own names: P tells what it has sent.
func TestSGLangTellsWhatItSent(t *testing.T) {
	s := simtest.New(t, sglangs("enable_metrics", "1"))
	body := simtest.Completion("x")
	rendezvous := rendezvous(s, 77)
	p, d := together(s, simtest.Completions, simtest.With(body, rendezvous), simtest.With(body, rendezvous))
	require.Equal(t, []int{200, 200}, []int{p.Status, d.Status})
	page := s.Get(s.P, "/metrics").Body
	assert.Contains(t, page, `sglang:kv_transfer_total_mb_count{model_name="tiny",tp_rank="0"} 1.0`)
	assert.Contains(t, page, fmt.Sprintf("} %g\n", float64(s.P.Stats().BytesTransferred)/(1<<20)))
	assert.NotContains(t, page, "vllm:")
	assert.Contains(t, s.Get(s.D, "/metrics").Body,
		`sglang:kv_transfer_total_mb_count{model_name="tiny",tp_rank="0"} 0.0`)

	off := simtest.New(t, sglangs())
	assert.Equal(t, 404, off.Get(off.P, "/metrics").Status)
}
