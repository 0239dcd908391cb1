// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

func bidirectional(t *testing.T) connector.KVConnector {
	t.Helper()
	c, err := nixl.New(&nixl.Options{Bidirectional: true})
	require.NoError(t, err)
	return c
}

// bothWays are engines that hand KV back, and that say so in streams as vLLM 0.33.0 does.
func bothWays() enginesim.Config {
	return enginesim.Config{StreamParams: true,
		Extra: map[string]string{"bidirectional_kv_xfer": "true", "kv_recompute_threshold": "0"}}
}

// With each API, streamed or not, the client never sees where D's KV is. This also holds if only the engines are
// configured to hand KV back, and the connector is not.
func TestNoClientIsToldWhereTheKVIs(t *testing.T) {
	for name, c := range map[string]connector.KVConnector{"nixl": nil, "bidirectional": bidirectional(t)} {
		x := start(t, setup{prefill: bothWays(), decode: bothWays(), conn: c})
		const messages = `"messages":[{"role":"user","content":"a prompt of more than one block, so D asks for KV"}]`
		for _, api := range []struct{ path, body string }{
			{"/v1/chat/completions", `{"model":"tiny","max_tokens":8,` + messages},
			{"/v1/completions", `{"model":"tiny","max_tokens":8,"prompt":"` + longPrompt + `"`},
			{"/v1/messages", `{"model":"tiny","max_tokens":8,` + messages},
			{"/v1/responses", `{"model":"tiny","max_output_tokens":8,"input":"` + longPrompt + `"`},
			{"/inference/v1/generate", `{"model":"tiny","sampling_params":{"max_tokens":8},"token_ids":[` +
				strings.Repeat("70,", 99) + `71]`},
		} {
			for _, more := range []string{"}", `,"stream":true}`,
				`,"stream":true,"stream_options":{"include_usage":true}}`} {
				for _, session := range []string{"", "talk" + api.path} {
					rule := fmt.Sprint(name, api.path, more, session)
					said := x.d.Stats().Requests
					got := post(t, x.url, api.path, api.body+more, "X-Session-ID", session)
					require.Equal(t, 200, got.status, "%s: %s", rule, got.body)
					require.NoError(t, got.err, rule)
					assert.Greater(t, x.d.Stats().Requests, said, rule)
					assert.NotContains(t, got.body, "remote_", rule)
					if n := got.header.Get("Content-Length"); n != "" {
						assert.Equal(t, n, strconv.Itoa(len(got.body)), rule)
					}
				}
			}
		}
	}
}

// tokenChunk is a chunk of a stream, as vLLM 0.33.0 writes it.
const tokenChunk = `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[` +
	`{"index":0,"delta":{"content":"say \"kv_transfer_params\": {\"remote_host\":1}"},"logprobs":null,` +
	`"finish_reason":null,"token_ids":null}],"kv_transfer_params":null}`

// lastChunk is the last chunk of a stream as the page of the protocol shows it.
func lastChunk(t *testing.T) string {
	t.Helper()
	page, err := os.ReadFile("../docs/protocols/vllm.md")
	require.NoError(t, err)
	_, after, ok := strings.Cut(string(page), "\ndata: {\"id\"")
	require.True(t, ok)
	line, _, _ := strings.Cut(after, "\n")
	return `data: {"id"` + line
}

func TestAStreamLosesNothingElse(t *testing.T) {
	last := lastChunk(t)
	params := gjson.Get(strings.TrimPrefix(last, "data: "), "kv_transfer_params").Raw
	require.Contains(t, params, "remote_host")
	for _, end := range []string{"\n\n", "\r\n\r\n"} {
		sent := tokenChunk + end + last + end + "data: [DONE]" + end
		want := strings.Replace(sent, params, "{}", 1)
		for _, size := range []int{1, 7, 100, 399, len(sent)} {
			x := script(t, &handing{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
				w.Header().Set("Content-Type", "text/event-stream")
				for rest := sent; rest != ""; {
					n := min(size, len(rest))
					_, _ = w.Write([]byte(rest[:n]))
					_ = http.NewResponseController(w).Flush()
					rest = rest[n:]
				}
			})
			got := post(t, x.url, "/v1/chat/completions", `{"messages":[],"stream":true}`)
			assert.Equal(t, want, got.body, "writes of %d bytes", size)
		}
	}
}

// The simulated engines' last chunk has the members of the page's, in the same order.
func TestTheSimulatedLastChunk(t *testing.T) {
	x := start(t, setup{prefill: bothWays(), decode: bothWays()})
	const body = `{"model":"tiny","max_tokens":2,"messages":[{"role":"user","content":"hi, this is a long prompt"}]`
	p := post(t, x.p.URL(), "/v1/chat/completions", body+`,"kv_transfer_params":{"do_remote_decode":true}}`)
	got := post(t, x.d.URL(), "/v1/chat/completions", body+`,"stream":true,"kv_transfer_params":`+
		gjson.Get(p.body, "kv_transfer_params").Raw+"}")
	lines := strings.Split(got.body, "\n\n")
	require.Greater(t, len(lines), 3, got.body)
	keys := func(line string) (names []string) {
		for _, at := range []string{"@this", "kv_transfer_params"} {
			gjson.Get(strings.TrimPrefix(line, "data: "), at).ForEach(func(key, _ gjson.Result) bool {
				names = append(names, key.Str)
				return true
			})
		}
		return names
	}
	assert.Equal(t, keys(lastChunk(t)), keys(lines[len(lines)-3]))
	assert.Contains(t, lines[1], `"kv_transfer_params":null`)
}

// handing is a connector with a handoff that D may return.
type handing struct {
	fake
	both bool
}

func (h *handing) Traits() connector.Traits {
	return connector.Traits{Name: "handing", Members: []string{connector.ParamsMember},
		Handoff: connector.Handoff{Member: connector.ParamsMember, FromDecode: h.both}}
}

// A host must not relay a response that may name D's KV. If one engine serves the request alone, its response names no
// KV, and the host may relay it.
func TestAResponseThatNamesTheKVIsNotRelayed(t *testing.T) {
	for _, c := range []struct {
		both   bool
		body   string
		relays bool
	}{
		{false, `{"prompt":"hi"}`, true},
		{true, `{"prompt":"hi"}`, false},
		{true, `{"prompt":"hi","n":2}`, true},
	} {
		x := script(t, &handing{both: c.both}, answer(ok), answer(fromD))
		s := begin(t, x.flow, c.body, nil)
		step, _, err := s.Next(context.Background())
		require.NoError(t, err)
		if step.Leg == pdflow.LegPrefill {
			req, _ := step.Take()
			step.Done(client.Transport.RoundTrip(req))
			step, _, err = s.Next(context.Background())
			require.NoError(t, err)
		}
		assert.Equal(t, c.relays, step.Relayable(), "%+v", c)
	}
}

// The second turn of a streamed conversation takes from D what D has answered.
func TestAStreamedConversationReusesDecodesKV(t *testing.T) {
	x := start(t, setup{prefill: atOwnPorts(t, bothWays()), decode: bothWays(), conn: bidirectional(t)})
	const more = `"stream":true`
	first := post(t, x.url, "/v1/completions", completion(longPrompt, more), "X-Session-ID", "talk")
	assert.NotContains(t, first.body, "remote_")
	assert.Contains(t, first.body, `"kv_transfer_params":{}`)
	assert.NotRegexp(t, `token_ids":\[`, first.body)
	prompt := longPrompt + first.text(t) + " And then?"
	require.NoError(t, x.p.Restart()) // P has forgotten the first prompt
	// A leg whose connection died with P is sent again, and then without the handoff, which may be used up.
	post(t, x.url, "/v1/completions", completion("hi", ""))
	second := post(t, x.url, "/v1/completions", completion(prompt, more), "X-Session-ID", "talk")
	assert.Equal(t, alone(t, "/v1/completions", completion(prompt, "")), second.text(t))
	assert.EqualValues(t, len(longPrompt)+16-1, x.p.Stats().ExternalKVTransfer)
	x.idle()
	require.NoError(t, x.p.CheckKV())
	require.NoError(t, x.d.CheckKV())
}
