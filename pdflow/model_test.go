// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/trtllm"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// What engines say, with M where the model's name is. All else that looks like one is the client's, or the model's.
var modelForms = map[connector.API]struct{ whole, stream string }{
	connector.APIChat: {
		`{"id":"c","object":"chat.completion","model":"M","choices":[{"index":0,"message":{"content":` +
			`"say \"model\":\"big\", big","tool_calls":[{"function":{"arguments":"{\"model\":\"big\"}"}}]},` +
			`"finish_reason":"stop"}],"metadata":{"model":"big"}}`,
		`data: {"id":"c","created":1,"model": "M","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}` +
			"\n\n" + `data: {"id":"c","model":"M","choices":[{"index":0,"delta":{"content":"\"model\":\"big\""}}]}` +
			"\n\n: \"model\":\"big\"\n\n" +
			`data: {"id":"c","model":"M","choices":[],"usage":{"prompt_tokens":1}}` + "\n\ndata: [DONE]\n\n",
	},
	connector.APICompletions: {
		`{"choices":[{"text":"{\"model\":\"big\"}","finish_reason":"stop"}],"model":"M"}`,
		`data: {"choices":[{"text":"\"model\":\"big\""}],"model":"M"}` + "\n\ndata: [DONE]\n\n",
	},
	connector.APIResponses: {
		`{"id":"r","metadata":{"model":"big"},"output":[{"model":"big"}],"model":"M","tools":[{"model":"big"}]}`,
		"event: response.created\n" + `data: {"type":"response.created","response":{"metadata":{"model":"big"},` +
			`"model":"M"}}` + "\n\n" + "event: response.output_item.added\n" +
			`data: {"type":"response.output_item.added","item":{"type":"message","model":"big"}}` + "\n\n" +
			"event: response.output_text.delta\n" +
			`data: {"type":"response.output_text.delta","delta":"\"model\":\"big\""}` + "\n\n" +
			"event: response.completed\n" + `data: {"type":"response.completed","response":{"model":"M","output":[]}}` +
			"\n\n",
	},
	connector.APIMessages: {
		`{"id":"m","type":"message","content":[{"type":"tool_use","input":{"model":"big"}}],"model":"M",` +
			`"stop_reason":"tool_use"}`,
		"event: message_start\n" + `data: {"type":"message_start","message":{"id":"m","model":"M","content":[]}}` +
			"\n\n" + "event: content_block_start\n" + `data: {"type":"content_block_start","index":0,"content_block":` +
			`{"type":"tool_use","input":{"model":"big"}}}` + "\n\n" +
			"event: message_stop\n" + `data: {"type":"message_stop"}` + "\n\n",
	},
	connector.APIGenerate: {
		`{"request_id":"g","choices":[{"index":0,"token_ids":[7],"finish_reason":"stop"}]}`,
		`data: {"choices":[{"index":0,"token_ids":[7]}]}` + "\n\ndata: [DONE]\n\n",
	},
}

func saysModel(form, name string) string {
	return strings.NewReplacer(`"model":"M"`, `"model":"`+name+`"`, `"model": "M"`, `"model": "`+name+`"`).Replace(form)
}

// asked is a client's request for a model.
func asked(api connector.API, model, more string) string {
	return strings.Replace(requestOf(api, more), `"tiny"`, `"`+model+`"`, 1)
}

// modelsOf collects the models that engines are asked for.
type modelsOf struct {
	mu  sync.Mutex
	all []string
}

var modelMember = regexp.MustCompile(`"model": *"([^"]*)"`)

func (m *modelsOf) noting(h handler) handler {
	return func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		m.mu.Lock()
		if found := modelMember.FindStringSubmatch(body); found != nil {
			m.all = append(m.all, found[1])
		}
		m.mu.Unlock()
		h(x, w, r, body)
	}
}

// Engines know the model as big and clients as gpt-4o, in all APIs, in both legs, in responses and in each event.
func TestEachSideNamesTheModelAsItKnowsIt(t *testing.T) {
	for api, form := range modelForms {
		for name, k := range map[string]struct {
			order  connector.Order
			body   string
			more   string
			pieces int
			traits func(*connector.Traits)
			says   string
		}{
			"whole":               {body: form.whole},
			"whole, in pieces":    {body: form.whole, pieces: 25},
			"streamed":            {body: form.stream, more: `"stream":true`},
			"streamed, in pieces": {body: form.stream, more: `"stream":true`, pieces: 25},
			"streamed beside prefill, counts corrected": {order: connector.Together, body: form.stream,
				more: `"stream":true`, traits: tellsReused},
			// one that serves the model by several names writes the first, whichever was asked for
			"by its first name": {body: form.stream, more: `"stream":true`, says: "big-first"},
		} {
			t.Run(api.String()+", "+name, func(t *testing.T) {
				var legs modelsOf
				says := k.says
				if says == "" {
					says = "big"
				}
				x := script(t, &fake{order: k.order, more: k.traits}, legs.noting(answer(saysModel(form.whole, says))),
					legs.noting(sending(saysModel(k.body, says), k.pieces)), pdflow.WithModel("big"))
				r := post(t, x.url, api.Path(), asked(api, "gpt-4o", k.more))
				require.Equal(t, http.StatusOK, r.status, r.body)
				assert.Equal(t, saysModel(k.body, "gpt-4o"), r.body)
				assert.Equal(t, []string{"big", "big"}, legs.all)
				if k.more == "" {
					assert.Equal(t, strconv.Itoa(len(r.body)), r.header.Get("Content-Length"))
				}
				assert.Equal(t, "big", x.seen.list()[0].Session.Model)
				if k.pieces > 0 {
					return // an engine that writes once
				}
				again := post(t, x.url, api.Path(), asked(api, "big", k.more))
				assert.Equal(t, saysModel(k.body, says), again.body, "who names the engines' model gets what they say")
			})
		}
	}
}

// All but the model's name reaches engines byte for byte.
func TestOnlyTheModelsNameChanges(t *testing.T) {
	var got []string
	engine := func(body string) handler {
		return func(x *scripted, w http.ResponseWriter, r *http.Request, sent string) {
			got = append(got, sent)
			answer(body)(x, w, r, sent)
		}
	}
	x := script(t, &fake{}, engine(ok), engine(`{"choices":[{"text":"a"}]}`), pdflow.WithModel(`a "b"`, "gpt-4o"))
	body := ` {"prompt" : "\"model\":\"gpt-4o\"", "mod\u0065l" : "gpt\u002d4o" , "user":"u","max_tokens":3}`
	require.Equal(t, http.StatusOK, post(t, x.url, "/v1/completions", body).status)
	require.Len(t, got, 2)
	assert.Equal(t, strings.Replace(body, `"gpt\u002d4o"`, `"a \"b\""`, 1), got[1])
	got = nil
	for _, none := range []string{`{"prompt":"a"}`, `{"model":null,"prompt":"a"}`, `{"model":"","prompt":"a"}`,
		`{"model":"other","prompt":"a"}`} {
		require.Equal(t, http.StatusOK, post(t, x.url, "/v1/completions", none).status)
		assert.Equal(t, none, got[len(got)-1], "names none, or one that stands for nothing")
	}
}

// Who names no model reads none of the engines' names either.
func TestARequestThatNamesNoModel(t *testing.T) {
	for name, k := range map[string]struct {
		opts []pdflow.Option
		want string
	}{
		"by its first name": {[]pdflow.Option{pdflow.WithModel("big", "gpt-4o", "gpt-4")}, "gpt-4"},
		"any":               {[]pdflow.Option{pdflow.WithModel("big")}, "big"},
		"its own, too":      {[]pdflow.Option{pdflow.WithModel("big", "big", "a")}, "big"},
	} {
		x := script(t, &fake{}, answer(ok), answer(`{"choices":[{"text":"a"}],"model":"big"}`), k.opts...)
		assert.Equal(t, `{"choices":[{"text":"a"}],"model":"`+k.want+`"}`,
			post(t, x.url, "/v1/completions", `{"prompt":"a"}`).body, name)
		x = script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, `{"error":{"message":"big says no"}}`)
		}, k.opts...)
		assert.Contains(t, post(t, x.url, "/v1/completions", `{"prompt":"a"}`).body, k.want+" says no", name)
	}
}

// An engine's words about its models are the client's words when they reach it.
func TestErrorTextsHaveTheClientsNames(t *testing.T) {
	const said = "The model `big` does not exist. Valid aliases: big, some-lora, bigger, a/big, big.1. Not big: 'big'."
	const told = "The model `gpt-4o` does not exist. Valid aliases: gpt-4o, b, bigger, a/big, big.1. " +
		"Not gpt-4o: 'gpt-4o'."
	opts := []pdflow.Option{pdflow.WithModel("big", "gpt-4", "gpt-4o"), pdflow.WithModel("some-lora", "b")}
	refusal := func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"error":{"message":"`+said+`","type":"NotFoundError","param":"model","code":404}}`)
	}
	failing := func(event string) handler { return sending("event: error\ndata: "+event+"\n\n", 0) }
	later := func(event string) handler {
		return sending(`data: {"model":"big","choices":[{"index":0,"delta":{"content":"a"}}]}`+"\n\ndata: "+event+
			"\n\n", 0)
	}
	for name, k := range map[string]struct {
		p, d   handler
		status int
	}{
		"prefill":         {p: refusal, d: answer(ok), status: 404},
		"decode":          {p: answer(ok), d: refusal, status: 404},
		"the first event": {p: answer(ok), d: failing(`{"error":{"message":"` + said + `"}}`), status: 500},
		"an event":        {p: answer(ok), d: later(`{"error":{"message":"` + said + `"}}`), status: 200},
		"response.failed": {p: answer(ok), d: later(`{"type":"response.failed","response":{"error":` +
			`{"message":"` + said + `"}}}`), status: 200},
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{}, k.p, k.d, opts...)
			r := post(t, x.url, "/v1/chat/completions", asked(connector.APIChat, "gpt-4o", `"stream":true`))
			assert.Equal(t, k.status, r.status)
			assert.Contains(t, r.body, told)
			r = post(t, x.url, "/v1/chat/completions", asked(connector.APIChat, "big", `"stream":true`))
			assert.Contains(t, r.body, said, "who names the engines' model may read it")
		})
	}
}

// Names of a model and of its adapter exchange each for its own, and an adapter's own name stays.
func TestNamesOfAModelAndOfItsAdapters(t *testing.T) {
	p, d, err := enginesim.Pair(enginesim.Config{Adapters: []string{"some-lora"}},
		enginesim.Config{Adapters: []string{"some-lora"}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	eps := []discovery.Endpoint{endpoint(t, p.URL(), discovery.RolePrefill), endpoint(t, d.URL(), discovery.RoleDecode)}
	for i := range eps {
		eps[i].Model, eps[i].Attributes = "tiny", map[string]string{"adapters": "some-lora"}
	}
	adapters := pdflow.WithAdapters(pick.Adapters(setOf(t, eps...)))
	named, _ := newFlow(t, nil, eps, adapters, pdflow.WithModel("tiny", "a"), pdflow.WithModel("some-lora", "b"))
	any, _ := newFlow(t, nil, eps, adapters, pdflow.WithModel("tiny"))
	text := map[string]string{}
	for _, model := range []string{"tiny", "some-lora"} {
		body := strings.Replace(completion(longPrompt, ""), "tiny", model, 1)
		text[model] = post(t, d.URL(), "/v1/completions", body).text(t)
	}
	require.NotEqual(t, text["tiny"], text["some-lora"])
	for model, want := range map[string]struct {
		flow   *pdflow.Flow
		served string
	}{"a": {named, "tiny"}, "b": {named, "some-lora"}, "some-lora": {any, "some-lora"}, "whatever": {any, "tiny"}} {
		body := strings.Replace(completion(longPrompt, ""), "tiny", model, 1)
		r := post(t, serve(t, want.flow), "/v1/completions", body)
		assert.Equal(t, text[want.served], r.text(t), model)
		assert.Contains(t, r.body, `"model":"`+model+`"`)
	}
}

// A Mux finds the flow by its names. A route goes before a name, and a name before what engines list.
func TestMuxRoutesByNames(t *testing.T) {
	serving := func(text string, opts ...pdflow.Option) *pdflow.Flow {
		return script(t, &fake{}, answer(ok), answer(`{"choices":[{"text":"`+text+`"}]}`), opts...).flow
	}
	is := func(name string) func(string) bool { return func(model string) bool { return model == name } }
	one := serving("one", pdflow.WithModel("one", "gpt-4o", "routed", "both"), pdflow.WithAdapters(is("stolen")))
	two := serving("two", pdflow.WithModel("two", "stolen", "both"), pdflow.WithAdapters(is("gpt-4o")))
	three := serving("three", pdflow.WithModel("x"))
	split, err := two.Split(serving("other"), 0)
	require.NoError(t, err)
	mux := newMux(t)
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"m1": one, "m2": split, "routed": three}))
	url := serve(t, mux)
	for model, want := range map[string]string{"m1": "one", "gpt-4o": "one", "stolen": "two", "both": "one",
		"routed": "three"} {
		assert.Equal(t, want, post(t, url, "/v1/completions", `{"model":"`+model+`","prompt":"a"}`).text(t), model)
	}
	for _, model := range []string{"*", "one", "two", "x"} {
		r := post(t, url, "/v1/completions", `{"model":"`+model+`","prompt":"a"}`)
		assert.Equal(t, http.StatusNotFound, r.status, model)
	}
	_, err = pdflow.NewMux(pdflow.WithModel("m"))
	require.ErrorContains(t, err, "WithModel is for flows")
}

// A flow that others fall back to goes by the client's name (a name that only the first engines knew drew 404 there:
// defilantech/LLMKube issue 1835).
func TestAFallbackHasItsOwnName(t *testing.T) {
	for name, k := range map[string]struct {
		opts []pdflow.Option
		want string
	}{
		"its own":                {[]pdflow.Option{pdflow.WithModel("small", "gpt-4o")}, "small"},
		"the same":               {[]pdflow.Option{pdflow.WithModel("big", "gpt-4o")}, "big"},
		"the client's":           {[]pdflow.Option{pdflow.WithModel("gpt-4o", "x")}, "gpt-4o"},
		"none, as the first has": {nil, "big"},
	} {
		t.Run(name, func(t *testing.T) {
			var legs modelsOf
			says := legs.noting(answer(`{"model":"whatever","choices":[{"text":"a"}]}`))
			other := script(t, &fake{}, says, says, k.opts...)
			flow, _ := newFlow(t, nil, nil, pdflow.WithFallback(config.FallbackConnector, other.flow),
				pdflow.WithModel("big", "gpt-4o"))
			r := post(t, serve(t, flow), "/v1/completions", asked(connector.APICompletions, "gpt-4o", ""))
			require.Equal(t, http.StatusOK, r.status, r.body)
			assert.Equal(t, []string{k.want, k.want}, legs.all)
			assert.Contains(t, r.body, `"model":"gpt-4o"`)
		})
	}
}

// A rescued stream, whose rest is another request, has the client's name from its beginning to its end.
func TestARescuedStreamKeepsTheClientsName(t *testing.T) {
	x, other := rescuing(t, pdflow.WithModel("tiny", "gpt-4o"))
	for _, c := range rescueCases(9) {
		want := post(t, x.url, c.path, c.body, "X-Request-Id", "same")
		require.Equal(t, http.StatusOK, want.status)
		before := len(other.Requests())
		c.body = strings.Replace(c.body, `"tiny"`, `"gpt-4o"`, 1)
		got := x.struck(c, enginesim.FaultKill, 3)
		require.NoError(t, got.err, c.name)
		require.Equal(t, http.StatusOK, got.status, c.name)
		require.Greater(t, len(other.Requests()), before, "not rescued: %s", c.name)
		assert.Equal(t, strings.ReplaceAll(sameOf(want.body), `"model":"tiny"`, `"model":"gpt-4o"`), sameOf(got.body),
			c.name)
	}
}

// Legs that a host sends have the engines' name; it cannot pass a response on that has to be changed.
func TestStepsNameTheEnginesModel(t *testing.T) {
	var legs modelsOf
	says := legs.noting(answer(`{"model":"big","choices":[{"text":"a"}]}`))
	x := script(t, &fake{}, says, says, pdflow.WithModel("big"))
	for model, relayable := range map[string]bool{"gpt-4o": false, "big": true} {
		s := begin(t, x.flow, `{"model":"`+model+`","prompt":"hi"}`, nil)
		step, _, err := s.Next(t.Context())
		require.NoError(t, err)
		step.Send(client.Transport)
		step, _, err = s.Next(t.Context())
		require.NoError(t, err)
		assert.Equal(t, relayable, step.Relayable(), model)
		step.Send(client.Transport)
		_, resp, err := s.Next(t.Context())
		require.NoError(t, err)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		assert.Contains(t, string(body), `"model":"`+model+`"`)
	}
	assert.Equal(t, []string{"big", "big", "big", "big"}, legs.all)
}

// Prefill's own response is the client's where it is final.
func TestPrefillsFinalResponseHasTheClientsName(t *testing.T) {
	conn, err := trtllm.New(nil)
	require.NoError(t, err)
	x := script(t, conn, answer(`{"id":"c","model":"big","created":1,"choices":[{"index":0,"text":"a",`+
		`"finish_reason":"stop"}]}`), answer(ok), pdflow.WithModel("big"))
	for _, more := range []string{"", `"stream":true`} {
		r := post(t, x.url, "/v1/completions", asked(connector.APICompletions, "gpt-4o", more))
		require.Equal(t, http.StatusOK, r.status, r.body)
		assert.Contains(t, r.body, `"model":"gpt-4o"`)
		assert.NotContains(t, r.body, "big")
	}
}

// Items of media go to encode engines by the engines' name, too.
func TestEncodeLegsNameTheEnginesModel(t *testing.T) {
	conn, err := epd.Wrap(&fake{}, &epd.Options{Type: "nixl"})
	require.NoError(t, err)
	var legs modelsOf
	engine := func(role discovery.Role, body string) discovery.Endpoint {
		return endpoint(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			sent, _ := io.ReadAll(r.Body)
			legs.noting(answer(body))(nil, w, r, string(sent))
		})), role)
	}
	flow, _ := newFlow(t, conn, []discovery.Endpoint{engine(discovery.RolePrefill, ok),
		engine(discovery.RoleDecode, `{"model":"big","choices":[{"text":"a"}]}`),
		engine(discovery.RoleEncode, `{"ec_transfer_params":{"h":{"peer_host":"10.0.0.7","peer_port":5601,`+
			`"size_bytes":4096}}}`)}, pdflow.WithModel("big"))
	r := post(t, serve(t, flow), "/v1/chat/completions", `{"model":"gpt-4o","messages":[{"role":"user","content":[`+
		`{"type":"image_url","image_url":{"url":"https://pictures.example/crane.png"}}]}]}`)
	require.Equal(t, http.StatusOK, r.status, r.body)
	assert.Equal(t, []string{"big", "big", "big"}, legs.all)
	assert.Contains(t, r.body, `"model":"gpt-4o"`)
}

func TestNamesThatAreRefused(t *testing.T) {
	for name, opt := range map[string][]pdflow.Option{
		"no served name":  {pdflow.WithModel("")},
		"any served name": {pdflow.WithModel("*")},
		"an empty name":   {pdflow.WithModel("m", "")},
		"two models":      {pdflow.WithModel("m", "a"), pdflow.WithModel("n", "a")},
		"any twice":       {pdflow.WithModel("m"), pdflow.WithModel("n")},
		"not UTF-8":       {pdflow.WithModel("m", "a\xff")},
	} {
		_, err := pdflow.New(&fake{}, pick.New(setOf(t), pick.RoundRobin()), opt...)
		require.ErrorContains(t, err, "WithModel", name)
	}
}

// BenchmarkNamedModel is what exchanging a model's name costs: beside BenchmarkRequest2KB and BenchmarkStreamPiece, for
// a request, and for an event of its stream.
func BenchmarkNamedModel(b *testing.B) {
	b.Run("request", func(b *testing.B) {
		flow := benchFlowOver(b, "http://p:1", "http://d:1", pdflow.WithTransport(stubs{}), pdflow.WithModel("big"))
		body := body2KB()
		b.ReportAllocs()
		for b.Loop() {
			flow.ServeHTTP(&discard{http.Header{}}, request2KB(body))
		}
	})
	b.Run("event", func(b *testing.B) {
		s := &streamStub{piece: []byte(tokenEvent), left: b.N}
		flow := benchFlowOver(b, "http://p:1", "http://d:1", pdflow.WithTransport(s), pdflow.WithModel("big"))
		b.ReportAllocs()
		b.ResetTimer()
		flow.ServeHTTP(&deadlines{discard: discard{http.Header{}}}, streamRequest())
	})
}
