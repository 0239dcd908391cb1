// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// What an engine says of a prompt of 90 tokens, in vLLM's forms: C cached tokens, N new in the cache, and I that are
// neither. The events before and behind have what looks like counts, and is none.
var usageForms = map[connector.API]struct{ whole, stream string }{
	connector.APIChat: {
		`{"choices":[{"index":0,"message":{"content":"\"cached_tokens\":7"},"finish_reason":"stop"}],` +
			`"usage":{"prompt_tokens":90,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":C,` +
			`"created_cache_tokens":N,"multimodal_tokens":null}}}`,
		`data: {"choices":[{"index":0,"delta":{"content":"\"cached_tokens\": 7"}}],"cached_tokens":7}` + "\n\n" +
			`data: {"choices":[],"usage":{"prompt_tokens":90,"completion_tokens":2,` +
			`"prompt_tokens_details":{"cached_tokens":C}}}` + "\n\ndata: [DONE]\n\n",
	},
	connector.APICompletions: {
		`{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":90,` +
			`"prompt_tokens_details":{"cached_tokens":C,"created_cache_tokens":null}}}`,
		`data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":90,"prompt_tokens_details":{"cached_tokens":C}}}` +
			"\n\ndata: [DONE]\n\n",
	},
	connector.APIResponses: {
		`{"id":"r","metadata":{"usage":"cached_tokens"},"usage":{"input_tokens":90,"input_tokens_details":` +
			`{"cached_tokens":C,"cache_write_tokens":N,"cached_tokens_per_turn":[C]},"output_tokens":2}}`,
		"event: response.created\n" + `data: {"type":"response.created","response":{"usage":null}}` + "\n\n" +
			`event: response.completed` + "\n" + `data: {"type":"response.completed","response":{"tools":[` +
			`{"cached_tokens":7}],"usage":{"input_tokens":90,"input_tokens_details":{"cached_tokens":C,` +
			`"cache_write_tokens":N,"cached_tokens_per_turn":[]},"output_tokens":2}}}` + "\n\n",
	},
	connector.APIMessages: {
		`{"content":[{"type":"tool_use","input":{"cache_read_input_tokens":7}}],"usage":{"input_tokens":I,` +
			`"output_tokens":2,"cache_creation_input_tokens":N,"cache_read_input_tokens":C}}`,
		"event: message_start\n" + `data: {"type":"message_start","message":{"usage":{"input_tokens":90,` +
			`"cache_creation_input_tokens":0,"cache_read_input_tokens":0}}}` + "\n\n" +
			"event: message_delta\n" + `data: {"type":"message_delta","usage":{"input_tokens":I,"output_tokens":2,` +
			`"cache_creation_input_tokens":N,"cache_read_input_tokens":C}}` + "\n\n" +
			"event: message_stop\n" + `data: {"type":"message_stop"}` + "\n\n",
	},
	connector.APIGenerate: {
		`{"choices":[{"index":0,"token_ids":[7],"finish_reason":"stop"}],"usage":{"prompt_tokens":90,` +
			`"prompt_tokens_details":{"cached_tokens":C}}}`,
		`data: {"choices":[{"index":0,"token_ids":[7]}]}` + "\n\n" + `data: {"choices":[],"usage":` +
			`{"prompt_tokens":90,"prompt_tokens_details":{"cached_tokens":C}}}` + "\n\ndata: [DONE]\n\n",
	},
}

func counts(form string, cached, created int) string {
	return strings.NewReplacer(":C", ":"+strconv.Itoa(cached), "[C]", "["+strconv.Itoa(cached)+"]",
		":N", ":"+strconv.Itoa(created), ":I", ":"+strconv.Itoa(90-cached-created)).Replace(form)
}

// sending is an engine that writes a response in pieces of so many bytes; 0 is one piece.
func sending(body string, piece int) handler {
	return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		kind := "application/json"
		if strings.Contains(body, "data: ") {
			kind = "text/event-stream"
		}
		w.Header().Set("Content-Type", kind)
		for piece > 0 && len(body) > piece {
			_, _ = io.WriteString(w, body[:piece])
			_ = http.NewResponseController(w).Flush()
			body = body[piece:]
			time.Sleep(100 * time.Microsecond)
		}
		_, _ = io.WriteString(w, body)
	}
}

// D has taken over the whole prompt and counts it as cached. The client is billed by what P had cached.
func TestTheClientGetsPrefillsCountOfCachedTokens(t *testing.T) {
	for api, form := range usageForms {
		for name, k := range map[string]struct {
			order  connector.Order
			body   string
			more   string
			pieces int
		}{
			"whole":                   {connector.PrefillThenDecode, form.whole, ``, 0},
			"whole, in pieces":        {connector.PrefillThenDecode, form.whole, ``, 25},
			"streamed":                {connector.PrefillThenDecode, form.stream, `"stream":true`, 0},
			"streamed, in pieces":     {connector.PrefillThenDecode, form.stream, `"stream":true`, 25},
			"streamed beside prefill": {connector.Together, form.stream, `"stream":true`, 0},
		} {
			t.Run(api.String()+", "+name, func(t *testing.T) {
				x := script(t, &fake{order: k.order, more: tellsReused}, sending(counts(form.whole, 48, 32), 0),
					sending(counts(k.body, 89, 0), k.pieces))
				r := post(t, x.url, api.Path(), requestOf(api, k.more))
				require.Equal(t, http.StatusOK, r.status, r.body)
				assert.Equal(t, counts(k.body, 48, 32), r.body)
				if k.more == "" {
					assert.Equal(t, strconv.Itoa(len(r.body)), r.header.Get("Content-Length"))
				}
				u := usageOf(t, x.seen)
				assert.Equal(t, []int64{48, 89}, []int64{u.Cached, u.Reused}, "cached on P, reused on D")
			})
		}
	}
}

func requestOf(api connector.API, more string) string {
	if api != connector.APIGenerate {
		return bodyOf(api, more)
	}
	if more != "" {
		more = "," + more
	}
	return `{"model":"tiny","token_ids":[1,2],"sampling_params":{"max_tokens":4}` + more + `}`
}

// What D took over is still counted where the flow alone asked for the counts.
func TestTheFlowsOwnCountsAreDecodes(t *testing.T) {
	form := usageForms[connector.APIChat]
	x := script(t, &fake{more: tellsReused}, sending(counts(form.whole, 48, 32), 0),
		sending(counts(form.stream, 89, 0), 0), usage)
	r := post(t, x.url, "/v1/chat/completions", bodyOf(connector.APIChat, `"stream":true`))
	assert.NotContains(t, r.body, `"usage"`)
	u := usageOf(t, x.seen)
	assert.Equal(t, []int64{48, 89}, []int64{u.Cached, u.Reused})
}

// Whose count reaches the client, byte for byte, in a completion of vLLM's.
func TestWhoseCountTheClientGets(t *testing.T) {
	form := usageForms[connector.APICompletions]
	const key = `{"kv_transfer_params":{"remote_prefill_cached_tokens":`
	keyed := func(t *connector.Traits) {
		tellsReused(t)
		t.Handoff.Member, t.Serving.CountKey = connector.ParamsMember, "remote_prefill_cached_tokens"
	}
	for name, k := range map[string]struct {
		traits func(*connector.Traits)
		opts   []pdflow.Option
		p      string // what P's response has before its choices
		want   int
	}{
		"D's, which is P's already":              {nil, nil, `{`, 89},
		"P's":                                    {tellsReused, nil, `{`, 48},
		"D's, as it is wanted":                   {tellsReused, []pdflow.Option{pdflow.WithEngineUsage()}, `{`, 89},
		"D's, to which the handoff told P's":     {keyed, nil, key + `48}, `, 89},
		"P's, since an older P tells D nothing":  {keyed, nil, `{"kv_transfer_params":{},`, 48},
		"P's, since P's count for D is null":     {keyed, nil, key + `null},`, 48},
		"P's, since the key is another object's": {keyed, nil, `{"remote_prefill_cached_tokens":48,`, 48},
	} {
		for _, body := range []string{form.whole, form.stream} {
			t.Run(name, func(t *testing.T) {
				x := script(t, &fake{more: k.traits}, sending(k.p+counts(form.whole, 48, 0)[1:], 0),
					sending(counts(body, 89, 0), 0), k.opts...)
				r := post(t, x.url, "/v1/completions",
					completion("hi", `"stream":`+strconv.FormatBool(body == form.stream)))
				assert.Equal(t, counts(body, k.want, 0), r.body)
			})
		}
	}
}

// P's response comes a moment after D's last event, or it never has a count: that of a P which was started without
// --enable-prompt-tokens-details counts as 0, since D's says nothing of a cache.
func TestAPrefillThatTellsItsCountLateOrNot(t *testing.T) {
	form := usageForms[connector.APICompletions]
	for name, k := range map[string]struct {
		p    handler
		want int
	}{
		"late": {func(s *scripted, w http.ResponseWriter, r *http.Request, body string) {
			time.Sleep(50 * time.Millisecond)
			sending(counts(form.whole, 48, 0), 0)(s, w, r, body)
		}, 48},
		"null": {answer(`{"choices":[],"usage":{"prompt_tokens":90,"prompt_tokens_details":null}}`), 0},
		"none": {answer(ok), 0},
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{order: connector.Together, more: tellsReused}, k.p,
				sending(counts(form.stream, 89, 0), 0))
			r := post(t, x.url, "/v1/completions", completion("hi", `"stream":true`))
			assert.Equal(t, counts(form.stream, k.want, 0), r.body)
		})
	}
}

// A D that had the prompt in its store, or in its cache, was asked without P. Its own count is the true one.
func TestADThatNeededNoPrefillCountsForItself(t *testing.T) {
	form := usageForms[connector.APICompletions]
	x := script(t, &cold{fake{order: connector.DecodeFirst, more: tellsReused}}, status(500),
		sending(counts(form.whole, 89, 0), 0))
	assert.Equal(t, counts(form.whole, 89, 0), post(t, x.url, "/v1/completions", completion("hi", "")).body)
	assert.Equal(t, int64(89), usageOf(t, x.seen).Reused)
}

// A host that passes D's response on by itself can do so whatever D counts: to refuse streams for it would be worse.
func TestAResponseThatAHostRelaysKeepsTheEnginesCounts(t *testing.T) {
	x := script(t, &fake{more: tellsReused}, answer(ok), answer(ok))
	steps, err := x.flow.Begin(context.Background(), &pdflow.Request{API: connector.APICompletions,
		Body: []byte(completion("hi", "")), Pick: &x.pair})
	require.NoError(t, err)
	defer steps.End(context.Canceled)
	for {
		step, _, err := steps.Next(t.Context())
		require.NoError(t, err)
		if step.Leg == pdflow.LegDecode {
			assert.True(t, step.Relayable())
			return
		}
		_, err = taken(step)
		require.NoError(t, err)
		step.Done(&http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"application/json"}},
			Body: io.NopCloser(strings.NewReader(ok))}, nil)
	}
}
