// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestEveryAPIOverBothLegs: the handoff works, streamed and not, and the text is that of one engine.
func TestEveryAPIOverBothLegs(t *testing.T) {
	for _, path := range []string{simtest.Completions, simtest.Chat, "/v1/responses", "/v1/messages",
		"/inference/v1/generate"} {
		t.Run(path, func(t *testing.T) {
			s := simtest.New(t)
			body := simtest.Request(path, "x", 24)
			one := s.Post(t.Context(), s.O, path, body)
			require.Equal(t, 200, one.Status, one.Body)
			want := one.Text()
			require.Len(t, want, 24)

			first := simtest.Leg(simtest.Request(path, "x", 1), simtest.Obj{"do_remote_decode": true})
			for _, stream := range []bool{false, true} {
				a := s.Post(t.Context(), s.P, path, first)
				got := s.Post(t.Context(), s.D, path, simtest.With(body, simtest.Obj{"stream": stream,
					"cache_salt": map[bool]string{true: "s", false: "w"}[stream], "kv_transfer_params": a.Params(t)}))
				require.Equal(t, 200, got.Status, got.Body)
				if stream {
					assert.Equal(t, "text/event-stream; charset=utf-8", got.Header.Get("Content-Type"))
					assert.Equal(t, want, got.StreamText())
				} else {
					assert.Equal(t, want, got.Text())
				}
			}
			assert.EqualValues(t, 2, s.D.Stats().Transfers)
			assert.Zero(t, s.D.Stats().LocalCompute)
			s.Clean()
		})
	}
}

func eventTypes(a simtest.Response) []string {
	var out []string
	for _, e := range a.Events() {
		if kind := gjson.Get(e, "type").String(); len(out) == 0 || out[len(out)-1] != kind {
			out = append(out, kind)
		}
	}
	return out
}

func TestResponsesEvents(t *testing.T) {
	s := simtest.New(t)
	a := s.Post(t.Context(), s.O, "/v1/responses", simtest.Streamed(simtest.Request("/v1/responses", "x", 4)))
	assert.Equal(t, []string{
		"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
		"response.output_text.delta",
		"response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
	}, eventTypes(a))
	for i, e := range a.Events() {
		assert.EqualValues(t, i, gjson.Get(e, "sequence_number").Int())
	}
	last := a.Events()[len(a.Events())-1]
	assert.Equal(t, "incomplete", gjson.Get(last, "response.status").String())
	assert.EqualValues(t, 4, gjson.Get(last, "response.usage.output_tokens").Int())
	assert.Contains(t, a.Body, "event: response.completed\ndata: {")
}

func TestMessagesEvents(t *testing.T) {
	s := simtest.New(t)
	a := s.Post(t.Context(), s.O, "/v1/messages", simtest.Streamed(simtest.Request("/v1/messages", "x", 4)))
	assert.Equal(t, []string{"message_start", "content_block_start", "content_block_delta", "content_block_stop",
		"message_delta", "message_stop", ""}, eventTypes(a))
	events := a.Events()
	assert.Equal(t, "max_tokens", gjson.Get(events[len(events)-3], "delta.stop_reason").String())
}

// TestRequestIDs: the header wins over the body, and nothing is echoed in headers (docs/protocols/nixl.md, recording
// 10).
func TestRequestIDs(t *testing.T) {
	s := simtest.New(t)
	ask := func(path string, more simtest.Obj, header ...string) simtest.Response {
		body := simtest.With(simtest.Request(path, "x", 1), more)
		return s.Post(t.Context(), s.P, path, simtest.Leg(body, simtest.Obj{"do_remote_decode": true}), header...)
	}
	internal := func(a simtest.Response) string { return a.Get("kv_transfer_params.remote_request_id").String() }
	a := ask(simtest.Completions, simtest.Obj{"request_id": "body"}, "X-Request-Id", "header")
	assert.Equal(t, "cmpl-header", a.Get("id").String())
	assert.Regexp(t, `^cmpl-header-0-[0-9a-f]{8}$`, internal(a))
	assert.Empty(t, a.Header.Get("X-Request-Id"))
	again := ask(simtest.Completions, nil, "X-Request-Id", "header")
	assert.NotEqual(t, internal(a), internal(again))
	assert.Equal(t, "cmpl-body", ask(simtest.Completions, simtest.Obj{"request_id": "body"}).Get("id").String())
	assert.Regexp(t, `^cmpl-[0-9a-f]{16}$`, ask(simtest.Completions, nil).Get("id").String())
	a = ask(simtest.Chat, nil, "X-Request-Id", "c")
	assert.Equal(t, "chatcmpl-c", a.Get("id").String())
	assert.Regexp(t, `^chatcmpl-c-[0-9a-f]{8}$`, internal(a))
	assert.Regexp(t, `^resp_[0-9a-f]{16}_0-[0-9a-f]{8}$`,
		internal(ask("/v1/responses", nil, "X-Request-Id", "ignored")))
}

// TestStopsEndEarly: stop strings and stop tokens, whole and streamed, with no more text than both agree on
// (docs/protocols/nixl.md, recording 20).
func TestStopsEndEarly(t *testing.T) {
	s := simtest.New(t)
	full := s.Alone(simtest.Completion("x"))
	rows := map[string]struct {
		more   simtest.Obj
		text   string
		reason any
		tokens int
	}{
		"string": {simtest.Obj{"stop": full[5:8]}, full[:5], full[5:8], 8},
		"list": {simtest.Obj{"stop": []string{"\x01never", full[3:4]}},
			full[:strings.Index(full, full[3:4])], full[3:4], strings.Index(full, full[3:4]) + 1},
		"string included": {simtest.Obj{"stop": full[5:8], "include_stop_str_in_output": true}, full[:8], full[5:8],
			8},
		"token":            {simtest.Obj{"stop_token_ids": []int{int(full[0])}}, "", float64(full[0]), 1},
		"token, min first": {simtest.Obj{"stop_token_ids": []int{int(full[0])}, "min_tokens": 24}, full, nil, 24},
		"never":            {simtest.Obj{"stop": "\x01"}, full, nil, 24},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			a := s.Ask(s.O, simtest.With(simtest.Completion("x"), row.more))
			require.Equal(t, 200, a.Status, a.Body)
			if name != "token, min first" {
				assert.Equal(t, row.text, a.Text())
				assert.EqualValues(t, row.tokens, a.Get("usage.completion_tokens").Int())
				assert.Equal(t, row.reason, a.Get("choices.0.stop_reason").Value())
			} else {
				assert.EqualValues(t, 24, a.Get("usage.completion_tokens").Int())
			}
			streamed := s.Ask(s.O, simtest.Streamed(simtest.With(simtest.Completion("x"), row.more)))
			assert.Equal(t, a.Text(), streamed.StreamText())
		})
	}
	h := s.Prefill(simtest.With(simtest.Completion("x"), simtest.Obj{"stop": full[:1]}))
	assert.Len(t, h, 14, "a prefill that stops early is handed off all the same")
	assert.Equal(t, full, s.Decode(simtest.Completion("x"), h).Text())
}

// TestSampling: children and seeds differ from each other, and repeat.
func TestSampling(t *testing.T) {
	s := simtest.New(t)
	ask := func(more simtest.Obj) simtest.Response {
		return s.Ask(s.O, simtest.With(simtest.Completion("x"), more))
	}
	a := ask(simtest.Obj{"n": 3, "temperature": 0.8, "seed": 1})
	texts := map[string]bool{}
	for _, c := range a.Get("choices").Array() {
		texts[c.Get("text").String()] = true
	}
	assert.Len(t, texts, 3)
	assert.EqualValues(t, 240, a.Get("usage.prompt_tokens").Int())
	assert.EqualValues(t, 72, a.Get("usage.completion_tokens").Int())
	assert.Equal(t, a.Get("choices").Raw, ask(simtest.Obj{"n": 3, "temperature": 0.8, "seed": 1}).Get("choices").Raw)
	assert.NotEqual(t, a.Text(), ask(simtest.Obj{"temperature": 0.8, "seed": 2}).Text())

	stream := ask(simtest.Obj{"n": 3, "temperature": 0.8, "seed": 1, "stream": true})
	byChoice := map[int64]string{}
	for _, e := range stream.Events() {
		byChoice[gjson.Get(e, "choices.0.index").Int()] += gjson.Get(e, "choices.0.text").String()
	}
	assert.Equal(t, a.Get("choices.2.text").String(), byChoice[2])
}

// TestRefusedRequests lists what is refused beside the recorded errors.
func TestRefusedRequests(t *testing.T) {
	s := simtest.New(t)
	rows := []struct {
		name, path string
		body       any
		status     int
		message    string
	}{
		{"no JSON", simtest.Completions, `{"prompt":`, 400, "JSON decode error"},
		{"an array", simtest.Completions, `[]`, 400, "validation error"},
		{"no prompt", simtest.Completions, simtest.Obj{"model": "tiny"}, 400, "prompt"},
		{"empty prompt", simtest.Completions, simtest.Obj{"prompt": ""}, 400, "empty"},
		{"prompt of the wrong type", simtest.Completions, simtest.Obj{"prompt": 5}, 400, "validation error"},
		{"max_tokens of the wrong type", simtest.Completions, simtest.Obj{"prompt": "x", "max_tokens": "5"}, 400,
			"body.max_tokens"},
		{"a token that is none", simtest.Completions, simtest.Obj{"prompt": []int{1, 70000}}, 400, "vocabulary"},
		{"no messages", simtest.Chat, simtest.Obj{"messages": []simtest.Obj{}}, 400, "at least 1 item"},
		{"max_completion_tokens 0", simtest.Chat,
			simtest.Obj{"messages": []simtest.Obj{{"role": "user", "content": "x"}},
				"max_completion_tokens": 0}, 400, "max_completion_tokens must be at least 1"},
		{"no max_tokens", "/v1/messages", simtest.Obj{"model": "tiny",
			"messages": []simtest.Obj{{"role": "user", "content": "x"}}}, 400, "max_tokens"},
		{"no input", "/v1/responses", simtest.Obj{}, 400, "body.input"},
		{"no sampling_params", "/inference/v1/generate", simtest.Obj{"token_ids": []int{1}}, 400, "sampling_params"},
		{"n 0", simtest.Completions, simtest.Obj{"prompt": "x", "n": 0}, 400, "n must be at least 1"},
		{"unknown path", "/v1/nothing", simtest.Obj{}, 404, "Not Found"},
		{"unknown model to tokenize", "/tokenize", simtest.Obj{"model": "nope", "prompt": "x"}, 404, "nope"},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			a := s.Post(t.Context(), s.O, row.path, row.body)
			require.NoError(t, a.Err)
			assert.Equal(t, row.status, a.Status, a.Body)
			assert.Contains(t, a.Get("error.message").String(), row.message)
			assert.EqualValues(t, row.status, a.Get("error.code").Int())
		})
	}
	a := s.Ask(s.O, simtest.Obj{"prompt": "x"}, "Content-Type", "text/plain")
	assert.Equal(t, 400, a.Status)
	assert.Equal(t, 405, s.Get(s.O, simtest.Completions).Status)
	assert.Equal(t, 404, s.Get(s.O, "/nothing").Status)
	assert.Zero(t, s.O.Stats().Requests, "none of them reached the scheduler")
}

// TestTokenizeAndBack gives one token per byte, and the chat's markers.
func TestTokenizeAndBack(t *testing.T) {
	s := simtest.New(t)
	a := s.Post(t.Context(), s.O, "/tokenize", simtest.Obj{"prompt": "héllo", "return_token_strs": true})
	assert.EqualValues(t, 6, a.Get("count").Int())
	assert.EqualValues(t, 2048, a.Get("max_model_len").Int())
	assert.Len(t, a.Get("token_strs").Array(), 6)
	back := s.Post(t.Context(), s.O, "/detokenize", `{"tokens":`+a.Get("tokens").Raw+`}`)
	assert.Equal(t, "héllo", back.Get("prompt").String())
	a = s.Post(t.Context(), s.O, "/tokenize",
		simtest.Obj{"messages": []simtest.Obj{{"role": "user", "content": simtest.Prompt(240, "x")}}})
	assert.EqualValues(t, 259, a.Get("count").Int(), "19 tokens around one user message")
	parts := s.Post(t.Context(), s.O, "/tokenize",
		simtest.Obj{"messages": []simtest.Obj{{"role": "user",
			"content": []simtest.Obj{{"type": "text", "text": simtest.Prompt(240, "x")}}}}})
	assert.Equal(t, a.Get("tokens").Raw, parts.Get("tokens").Raw)
}

// FuzzRequest throws bodies at every API: whatever comes, the response is JSON or a stream, and the engine lives.
func FuzzRequest(f *testing.F) {
	paths := []string{simtest.Completions, simtest.Chat, "/v1/responses", "/v1/messages", "/inference/v1/generate",
		"/tokenize", "/detokenize"}
	e, err := enginesim.Start(enginesim.Config{MaxModelLen: 512, Blocks: 64, DefaultMaxTokens: 4, KeepRequests: -1})
	require.NoError(f, err)
	f.Cleanup(func() { assert.NoError(f, e.Close()) })
	shared := simtest.NewClient(f)
	for i, path := range paths {
		seed, err := json.Marshal(simtest.Request(path, "x", 3))
		require.NoError(f, err)
		f.Add(uint8(i), string(seed))
	}
	f.Add(uint8(0),
		`{"prompt":[[1,2],[3]],"stop":["a"],"n":2,"echo":true,"logprobs":1,"stream":true,`+
			`"stream_options":{"include_usage":true}}`)
	f.Add(uint8(1),
		`{"messages":[{"role":"user","content":[{"text":"x"}]},{"role":"assistant","content":null}],"tools":[{}],`+
			`"kv_transfer_params":{"prompt_token_ids":[1,-5]}}`)
	f.Add(uint8(1), `{"messages":[{"content":5}],"kv_transfer_params":[]}`)
	f.Fuzz(func(t *testing.T, which uint8, body string) {
		c := &simtest.Client{T: t, HTTP: shared.HTTP}
		a := c.Post(t.Context(), e, paths[int(which)%len(paths)], body)
		require.NoError(t, a.Err)
		require.Contains(t, []int{200, 400, 404}, a.Status)
		if !strings.HasPrefix(a.Header.Get("Content-Type"), "text/event-stream") {
			require.True(t, json.Valid([]byte(a.Body)), a.Body)
		}
		require.False(t, e.Dead())
	})
}

func TestRenderSaysWhichTokensAPromptHas(t *testing.T) {
	s := simtest.New(t)
	a := s.Post(t.Context(), s.P, simtest.Completions+"/render", simtest.Obj{"model": "tiny", "prompt": "abc"})
	assert.JSONEq(t, `[97,98,99]`, a.Get("0.token_ids").Raw, a.Body)
	asked := simtest.Obj{"model": "tiny", "messages": []simtest.Obj{{"role": "user", "content": "abc"}},
		"max_tokens": 1, "return_token_ids": true}
	a = s.Post(t.Context(), s.P, simtest.Chat+"/render", asked)
	assert.JSONEq(t, s.Ask(s.P, asked).Get("prompt_token_ids").Raw, a.Get("token_ids").Raw)
	assert.Equal(t, 404, s.Post(t.Context(), s.P, simtest.Completions+"/render",
		simtest.Obj{"model": "other", "prompt": "a"}).Status)
}
