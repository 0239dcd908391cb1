// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bufio"
	"encoding/json"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func readFile(t *testing.T, name string) string {
	data, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(data)
}

// request is a request of one of the five APIs for some tokens.
func request(path, name string, tokens int) obj {
	text := prompt(240, name)
	switch path {
	case chat, "/v1/messages":
		return obj{"model": "tiny", "messages": []obj{{"role": "user", "content": text}}, "max_tokens": tokens, "temperature": 0}
	case "/v1/responses":
		return obj{"model": "tiny", "input": text, "max_output_tokens": tokens, "temperature": 0}
	case "/inference/v1/generate":
		ids := make([]int, len(text))
		for i := range ids {
			ids[i] = int(text[i])
		}
		return obj{"model": "tiny", "token_ids": ids, "sampling_params": obj{"max_tokens": tokens, "temperature": 0}}
	}
	return obj{"model": "tiny", "prompt": text, "max_tokens": tokens, "temperature": 0}
}

// wholeText is the text of a whole answer of any API.
func wholeText(a answer) string {
	for _, path := range []string{"choices.0.message.content", "choices.0.text", "output.0.content.0.text", "content.0.text"} {
		if r := a.get(path); r.Exists() {
			return r.String()
		}
	}
	var text strings.Builder
	for _, id := range a.get("choices.0.token_ids").Array() {
		text.WriteByte(byte(id.Int()))
	}
	return text.String()
}

// streamText is the text of a stream of any API, piece by piece.
func streamText(a answer) string {
	var text strings.Builder
	for _, e := range a.events() {
		for _, path := range []string{"choices.0.delta.content", "choices.0.text", "delta.text"} {
			text.WriteString(gjson.Get(e, path).String())
		}
		if gjson.Get(e, "type").String() == "response.output_text.delta" {
			text.WriteString(gjson.Get(e, "delta").String())
		}
		for _, id := range gjson.Get(e, "choices.0.token_ids").Array() {
			text.WriteByte(byte(id.Int()))
		}
	}
	return text.String()
}

// TestEveryAPIOverBothLegs: the handoff works, streamed and not, and the text is
// that of one engine.
func TestEveryAPIOverBothLegs(t *testing.T) {
	for _, path := range []string{completions, chat, "/v1/responses", "/v1/messages", "/inference/v1/generate"} {
		t.Run(path, func(t *testing.T) {
			s := newScene(t)
			body := request(path, "x", 24)
			one := s.post(t.Context(), s.o, path, body)
			require.Equal(t, 200, one.status, one.body)
			want := wholeText(one)
			require.Len(t, want, 24)

			first := with(request(path, "x", 1), obj{"kv_transfer_params": obj{"do_remote_decode": true}})
			for _, stream := range []bool{false, true} {
				a := s.post(t.Context(), s.p, path, first)
				require.Equal(t, 200, a.status, a.body)
				h := obj{}
				require.NoError(t, json.Unmarshal([]byte(a.get("kv_transfer_params").Raw), &h))
				got := s.decode(path, with(body, obj{"stream": stream, "cache_salt": map[bool]string{true: "s", false: "w"}[stream]}), h)
				require.Equal(t, 200, got.status, got.body)
				if stream {
					assert.Equal(t, "text/event-stream; charset=utf-8", got.header.Get("Content-Type"))
					assert.Equal(t, want, streamText(got))
				} else {
					assert.Equal(t, want, wholeText(got))
				}
			}
			assert.EqualValues(t, 2, s.d.Stats().Transfers)
			assert.Zero(t, s.d.Stats().LocalCompute)
			assert.NoError(t, s.p.CheckKV())
			assert.NoError(t, s.d.CheckKV())
		})
	}
}

func eventTypes(a answer) []string {
	var out []string
	for _, e := range a.events() {
		if kind := gjson.Get(e, "type").String(); len(out) == 0 || out[len(out)-1] != kind {
			out = append(out, kind)
		}
	}
	return out
}

func TestResponsesEvents(t *testing.T) {
	s := newScene(t)
	a := s.post(t.Context(), s.o, "/v1/responses", with(request("/v1/responses", "x", 4), obj{"stream": true}))
	assert.Equal(t, []string{
		"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added", "response.output_text.delta",
		"response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
	}, eventTypes(a))
	for i, e := range a.events() {
		assert.EqualValues(t, i, gjson.Get(e, "sequence_number").Int())
	}
	last := a.events()[len(a.events())-1]
	assert.Equal(t, "incomplete", gjson.Get(last, "response.status").String())
	assert.EqualValues(t, 4, gjson.Get(last, "response.usage.output_tokens").Int())
	assert.Contains(t, a.body, "event: response.completed\ndata: {")
}

func TestMessagesEvents(t *testing.T) {
	s := newScene(t)
	a := s.post(t.Context(), s.o, "/v1/messages", with(request("/v1/messages", "x", 4), obj{"stream": true}))
	assert.Equal(t, []string{"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop", ""}, eventTypes(a))
	events := a.events()
	assert.Equal(t, "max_tokens", gjson.Get(events[len(events)-3], "delta.stop_reason").String())
}

// TestRequestIDs: the header wins over the body, and nothing is echoed in headers
// (capture 10).
func TestRequestIDs(t *testing.T) {
	s := newScene(t)
	ask := func(path string, more obj, header ...string) answer {
		return s.post(t.Context(), s.p, path, with(with(request(path, "x", 1), more), obj{"kv_transfer_params": obj{"do_remote_decode": true}}), header...)
	}
	internal := func(a answer) string { return a.get("kv_transfer_params.remote_request_id").String() }
	a := ask(completions, obj{"request_id": "body"}, "X-Request-Id", "header")
	assert.Equal(t, "cmpl-header", a.get("id").String())
	assert.Regexp(t, `^cmpl-header-0-[0-9a-f]{8}$`, internal(a))
	assert.Empty(t, a.header.Get("X-Request-Id"))
	again := ask(completions, nil, "X-Request-Id", "header")
	assert.NotEqual(t, internal(a), internal(again))
	assert.Equal(t, "cmpl-body", ask(completions, obj{"request_id": "body"}).get("id").String())
	assert.Regexp(t, `^cmpl-[0-9a-f]{16}$`, ask(completions, nil).get("id").String())
	a = ask(chat, nil, "X-Request-Id", "c")
	assert.Equal(t, "chatcmpl-c", a.get("id").String())
	assert.Regexp(t, `^chatcmpl-c-[0-9a-f]{8}$`, internal(a))
	assert.Regexp(t, `^resp_[0-9a-f]{16}_0-[0-9a-f]{8}$`, internal(ask("/v1/responses", nil, "X-Request-Id", "ignored")))
}

// TestStopsEndEarly: stop strings and stop tokens, whole and streamed, with no
// more text than both agree on (capture 20).
func TestStopsEndEarly(t *testing.T) {
	s := newScene(t)
	full := s.alone(completions, completion("x"))
	rows := map[string]struct {
		more   obj
		text   string
		reason any
		tokens int
	}{
		"string":           {obj{"stop": full[5:8]}, full[:5], full[5:8], 8},
		"list":             {obj{"stop": []string{"\x01never", full[3:4]}}, full[:strings.Index(full, full[3:4])], full[3:4], strings.Index(full, full[3:4]) + 1},
		"string included":  {obj{"stop": full[5:8], "include_stop_str_in_output": true}, full[:8], full[5:8], 8},
		"token":            {obj{"stop_token_ids": []int{int(full[0])}}, "", float64(full[0]), 1},
		"token, min first": {obj{"stop_token_ids": []int{int(full[0])}, "min_tokens": 24}, full, nil, 24},
		"never":            {obj{"stop": "\x01"}, full, nil, 24},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			a := s.post(t.Context(), s.o, completions, with(completion("x"), row.more))
			require.Equal(t, 200, a.status, a.body)
			if name != "token, min first" {
				assert.Equal(t, row.text, a.text())
				assert.EqualValues(t, row.tokens, a.get("usage.completion_tokens").Int())
				assert.Equal(t, row.reason, a.get("choices.0.stop_reason").Value())
			} else {
				assert.EqualValues(t, 24, a.get("usage.completion_tokens").Int())
			}
			streamed := s.post(t.Context(), s.o, completions, with(with(completion("x"), row.more), obj{"stream": true}))
			assert.Equal(t, a.text(), streamText(streamed))
		})
	}
	h := s.prefill(completions, with(completion("x"), obj{"stop": full[:1]}))
	assert.Len(t, h, 14, "a prefill that stops early is handed off all the same")
	assert.Equal(t, full, s.decode(completions, completion("x"), h).text())
}

// TestSampling: children and seeds differ from each other, and repeat.
func TestSampling(t *testing.T) {
	s := newScene(t)
	ask := func(more obj) answer { return s.post(t.Context(), s.o, completions, with(completion("x"), more)) }
	a := ask(obj{"n": 3, "temperature": 0.8, "seed": 1})
	texts := map[string]bool{}
	for _, c := range a.get("choices").Array() {
		texts[c.Get("text").String()] = true
	}
	assert.Len(t, texts, 3)
	assert.EqualValues(t, 240, a.get("usage.prompt_tokens").Int())
	assert.EqualValues(t, 72, a.get("usage.completion_tokens").Int())
	assert.Equal(t, a.get("choices").Raw, ask(obj{"n": 3, "temperature": 0.8, "seed": 1}).get("choices").Raw)
	assert.NotEqual(t, a.text(), ask(obj{"temperature": 0.8, "seed": 2}).text())

	stream := ask(obj{"n": 3, "temperature": 0.8, "seed": 1, "stream": true})
	byChoice := map[int64]string{}
	for _, e := range stream.events() {
		byChoice[gjson.Get(e, "choices.0.index").Int()] += gjson.Get(e, "choices.0.text").String()
	}
	assert.Equal(t, a.get("choices.2.text").String(), byChoice[2])
}

// TestRefusedRequests lists what is refused beside the recorded errors.
func TestRefusedRequests(t *testing.T) {
	s := newScene(t)
	rows := []struct {
		name, path string
		body       any
		status     int
		message    string
	}{
		{"no JSON", completions, `{"prompt":`, 400, "JSON decode error"},
		{"an array", completions, `[]`, 400, "validation error"},
		{"no prompt", completions, obj{"model": "tiny"}, 400, "prompt"},
		{"empty prompt", completions, obj{"prompt": ""}, 400, "empty"},
		{"prompt of the wrong type", completions, obj{"prompt": 5}, 400, "validation error"},
		{"max_tokens of the wrong type", completions, obj{"prompt": "x", "max_tokens": "5"}, 400, "body.max_tokens"},
		{"a token that is none", completions, obj{"prompt": []int{1, 70000}}, 400, "vocabulary"},
		{"no messages", chat, obj{"messages": []obj{}}, 400, "at least 1 item"},
		{"max_completion_tokens 0", chat, obj{"messages": []obj{{"role": "user", "content": "x"}}, "max_completion_tokens": 0}, 400, "max_completion_tokens must be at least 1"},
		{"no max_tokens", "/v1/messages", obj{"model": "tiny", "messages": []obj{{"role": "user", "content": "x"}}}, 400, "max_tokens"},
		{"no input", "/v1/responses", obj{}, 400, "body.input"},
		{"no sampling_params", "/inference/v1/generate", obj{"token_ids": []int{1}}, 400, "sampling_params"},
		{"n 0", completions, obj{"prompt": "x", "n": 0}, 400, "n must be at least 1"},
		{"unknown path", "/v1/nothing", obj{}, 404, "Not Found"},
		{"unknown model to tokenize", "/tokenize", obj{"model": "nope", "prompt": "x"}, 404, "nope"},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			a := s.post(t.Context(), s.o, row.path, row.body)
			require.NoError(t, a.err)
			assert.Equal(t, row.status, a.status, a.body)
			assert.Contains(t, a.get("error.message").String(), row.message)
			assert.EqualValues(t, row.status, a.get("error.code").Int())
		})
	}
	a := s.post(t.Context(), s.o, completions, obj{"prompt": "x"}, "Content-Type", "text/plain")
	assert.Equal(t, 400, a.status)
	assert.Equal(t, 405, s.get(s.o, completions).status)
	assert.Equal(t, 404, s.get(s.o, "/nothing").status)
	assert.Zero(t, s.o.Stats().Requests, "none of them reached the scheduler")
}

// TestTokenizeAndBack gives one token per byte, and the chat's markers.
func TestTokenizeAndBack(t *testing.T) {
	s := newScene(t)
	a := s.post(t.Context(), s.o, "/tokenize", obj{"prompt": "héllo", "return_token_strs": true})
	assert.EqualValues(t, 6, a.get("count").Int())
	assert.EqualValues(t, 2048, a.get("max_model_len").Int())
	assert.Len(t, a.get("token_strs").Array(), 6)
	back := s.post(t.Context(), s.o, "/detokenize", `{"tokens":`+a.get("tokens").Raw+`}`)
	assert.Equal(t, "héllo", back.get("prompt").String())
	a = s.post(t.Context(), s.o, "/tokenize", obj{"messages": []obj{{"role": "user", "content": prompt(240, "x")}}})
	assert.EqualValues(t, 259, a.get("count").Int(), "19 tokens around one user message")
	parts := s.post(t.Context(), s.o, "/tokenize", obj{"messages": []obj{{"role": "user", "content": []obj{{"type": "text", "text": prompt(240, "x")}}}}})
	assert.Equal(t, a.get("tokens").Raw, parts.get("tokens").Raw)
}

// TestIdleConnectionsClose after KeepAlive, as uvicorn's do.
func TestIdleConnectionsClose(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{KeepAlive: 50 * time.Millisecond})
	require.NoError(t, err)
	defer e.Close()
	conn, err := net.Dial("tcp", strings.TrimPrefix(e.URL(), "http://"))
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Write([]byte("GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
	require.NoError(t, err)
	r := bufio.NewReader(conn)
	line, err := r.ReadString('\n')
	require.NoError(t, err)
	assert.Equal(t, "HTTP/1.1 200 OK\r\n", line)
	begun := time.Now()
	for err == nil {
		_, err = r.ReadString('\n')
	}
	assert.GreaterOrEqual(t, time.Since(begun), 40*time.Millisecond)
	assert.Less(t, time.Since(begun), 3*time.Second)
}

// TestRequestsAreKeptAsReceived, in order and bounded.
func TestRequestsAreKeptAsReceived(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{KeepRequests: 2})
	require.NoError(t, err)
	defer e.Close()
	c := newClient(t)
	for _, p := range []string{"a", "b", "c"} {
		c.post(t.Context(), e, completions, `{ "prompt" : "`+p+`" }`, "X-Request-Id", p)
	}
	c.get(e, "/health")
	got := e.Requests()
	require.Len(t, got, 2)
	assert.Equal(t, `{ "prompt" : "b" }`, string(got[0].Body))
	assert.Equal(t, completions, got[1].Path)
	assert.Equal(t, "c", got[1].Header.Get("X-Request-Id"))
}

// TestChunksPerWrite changes how events are written, not what they say.
func TestChunksPerWrite(t *testing.T) {
	texts := map[string]bool{}
	for _, n := range []int{1, 20} {
		e, err := enginesim.Start(enginesim.Config{ChunksPerWrite: n})
		require.NoError(t, err)
		a := newClient(t).post(t.Context(), e, completions, with(completion("x"), obj{"stream": true, "max_tokens": 50}))
		assert.Len(t, a.events(), 51)
		texts[streamText(a)] = true
		require.NoError(t, e.Close())
	}
	assert.Len(t, texts, 1)
}

func TestConfigIsChecked(t *testing.T) {
	rows := map[string]enginesim.Config{
		"Connector":     {Connector: "pigeon"},
		"KVRole":        {KVRole: "producer"},
		"LoadFailure":   {LoadFailure: "ignore"},
		"BytesPerToken": {BytesPerToken: 12},
		"MaxModelLen":   {MaxModelLen: 1000, BlockSize: 16, Blocks: 10},
		"positive":      {Blocks: -1},
		"negative":      {ITL: -1},
	}
	for name, cfg := range rows {
		_, err := enginesim.Start(cfg)
		assert.ErrorContains(t, err, name)
	}
}

// FuzzRequest throws bodies at every API: whatever comes, the answer is JSON or a
// stream, and the engine lives.
func FuzzRequest(f *testing.F) {
	paths := []string{completions, chat, "/v1/responses", "/v1/messages", "/inference/v1/generate", "/tokenize", "/detokenize"}
	e, err := enginesim.Start(enginesim.Config{MaxModelLen: 512, Blocks: 64, DefaultMaxTokens: 4, KeepRequests: -1})
	require.NoError(f, err)
	f.Cleanup(func() { assert.NoError(f, e.Close()) })
	shared := newClient(f)
	for i, path := range paths {
		seed, err := json.Marshal(request(path, "x", 3))
		require.NoError(f, err)
		f.Add(uint8(i), string(seed))
	}
	f.Add(uint8(0), `{"prompt":[[1,2],[3]],"stop":["a"],"n":2,"echo":true,"logprobs":1,"stream":true,"stream_options":{"include_usage":true}}`)
	f.Add(uint8(1), `{"messages":[{"role":"user","content":[{"text":"x"}]},{"role":"assistant","content":null}],"tools":[{}],"kv_transfer_params":{"prompt_token_ids":[1,-5]}}`)
	f.Add(uint8(1), `{"messages":[{"content":5}],"kv_transfer_params":[]}`)
	f.Fuzz(func(t *testing.T, which uint8, body string) {
		c := &client{t: t, http: shared.http}
		a := c.post(t.Context(), e, paths[int(which)%len(paths)], body)
		require.NoError(t, a.err)
		require.Contains(t, []int{200, 400, 404}, a.status)
		if !strings.HasPrefix(a.header.Get("Content-Type"), "text/event-stream") {
			require.True(t, json.Valid([]byte(a.body)), a.body)
		}
		require.False(t, e.Dead())
	})
}
