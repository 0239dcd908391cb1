// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// twoPairs are two prefill and two decode engines, of which the second of each has loaded the adapter a-lora.
func twoPairs(t *testing.T, opts ...pdflow.Option) (x *pd, others [2]*enginesim.Engine) {
	t.Helper()
	p, d, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	p.LoadAdapter("a-lora")
	d.LoadAdapter("a-lora")
	x = start(t, setup{opts: opts, more: []discovery.Endpoint{endpoint(t, p.URL(), discovery.RolePrefill),
		endpoint(t, d.URL(), discovery.RoleDecode)}})
	return x, [2]*enginesim.Engine{p, d}
}

// A LoRA adapter is loaded on some engines only, at run time, and lost at a restart (vllm-project/aibrix issue 236).
func TestAnAdapterThatSomeEnginesLackIsServedByTheOthers(t *testing.T) {
	x, have := twoPairs(t, pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
	ask := func(model string) reply {
		return post(t, x.url, "/v1/completions", `{"model":"`+model+`","prompt":"`+longPrompt+`","max_tokens":8}`)
	}
	for range 20 {
		r := ask("a-lora")
		require.Equal(t, 200, r.status, r.body)
		require.Contains(t, r.body, `"model":"a-lora"`)
	}
	assert.Len(t, x.p.Requests(), 1, "a prefill engine without it is asked once")
	assert.LessOrEqual(t, len(have[0].Requests()), 21, "a decode engine without it wastes one prefill")
	assert.Len(t, x.d.Requests(), 2, "asked once, and once more to let go of the KV that was for it")
	for range 20 {
		require.Equal(t, 200, ask("tiny").status)
	}
	assert.Len(t, x.p.Requests(), 11, "for other models nothing has changed")
	for _, e := range have { // restarted
		e.UnloadAdapter("a-lora")
	}
	x.p.LoadAdapter("a-lora")
	x.d.LoadAdapter("a-lora")
	require.Equal(t, 200, ask("a-lora").status, "loaded since, on engines that had said that they lack it")
}

// What an engine lacks is remembered by the engines' name for it, whichever of the clients' names a request has.
func TestAnAdapterWithSeveralNamesIsAskedForOnceAtAnEngineThatLacksIt(t *testing.T) {
	x, have := twoPairs(t, pdflow.WithRetry(config.Retry{MaxAttempts: 1}), pdflow.WithModel("a-lora", "x", "y"))
	for i := range 10 {
		name := string("xy"[i%2])
		r := post(t, x.url, "/v1/completions", `{"model":"`+name+`","prompt":"`+longPrompt+`","max_tokens":8}`)
		require.Equal(t, 200, r.status, r.body)
		require.Contains(t, r.body, `"model":"`+name+`"`)
	}
	assert.Len(t, x.p.Requests(), 1, "once for both names")
	assert.LessOrEqual(t, len(have[0].Requests()), 11)
	assert.Len(t, x.d.Requests(), 2, "and once more to let go of the KV")
}

// The client sees the 404 when nobody has the model, and a name that nobody has costs each engine little.
func TestAModelThatNobodyHasIsTheClientsError(t *testing.T) {
	x, others := twoPairs(t)
	for range 5 {
		r := post(t, x.url, "/v1/completions", `{"model":"b-lora","prompt":"hello"}`)
		require.Equal(t, 404, r.status)
		require.Contains(t, r.body, "The model `b-lora` does not exist")
	}
	assert.LessOrEqual(t, len(x.p.Requests())+len(others[0].Requests()), 6, "one more for each engine, once")
	assert.Empty(t, x.d.Requests())
	assert.Empty(t, others[1].Requests())
}

// One prefill engine lacks the model, and the other one fails once: the request is retried there, since nobody else can
// serve it. The 404 of the first says nothing of it.
func TestARequestThatFailedIsRetriedWhereTheModelIs(t *testing.T) {
	no := saysNo(404, "{\"error\":{\"message\":\"The model `m` does not exist.\",\"type\":\"NotFoundError\","+
		`"param":"model","code":404}}`)
	for name, failing := range map[string]string{"prefill fails": "p1", "decode fails": "d0"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fails := false
				twice := config.Retry{MaxAttempts: 2}
				f := newFakeFleet(t, &fake{}, "p0 p1 d0", twice, func(host string, _ int) response {
					switch {
					case host == "p0":
						return no
					case host == failing && fails:
						fails = false
						return replies(500)
					}
					return replies(200)
				})
				const body = `{"model":"m","prompt":"hi"}`
				for range 4 { // it is learnt who lacks the model
					require.NoError(t, f.do(body))
				}
				for range 4 {
					fails = true
					require.NoError(t, f.do(body))
					require.False(t, fails)
				}
				time.Sleep(time.Minute)
			})
		})
	}
}

// Which answers are asked for at another engine, and of whom they speak.
func TestWhoseWordARefusalIs(t *testing.T) {
	vllm := func(text, kind, param string) string {
		return `{"error":{"message":"` + text + `","type":"` + kind + `","param":` + param + `,"code":404}}`
	}
	const lost, unsupported = "The model `a` does not exist.", `{"error":{"message":"no","type":"NotImplementedError"}}`
	for name, c := range map[string]struct {
		status int
		body   string
		legs   string // where only p0 says so, unless want is the engine's status
		want   int
	}{
		"vLLM, a model": {404, vllm(lost, "NotFoundError", `"model"`), "p0 p1 d0", 200},
		"an older vLLM": {404, `{"object":"error","message":"` + lost + `","type":"NotFoundError","param":null}`,
			"p0 p1 d0", 200},
		"as OpenAI": {404, `{"error":{"message":"no","param":"model","code":"model_not_found"}}`, "p0 p1 d0", 200},
		"Messages":  {404, `{"type":"error","error":{"type":"x","message":"` + lost + `"}}`, "p0 p1 d0", 200},
		"SGLang, Responses": {404, `{"error":{"message":"The model 'a' does not exist","type":` +
			`"invalid_request_error","param":"model","code":404}}`, "p0 p1 d0", 200},
		"a proxy's 413": {413, `<html>too large</html>`, "p0 p1 d0", 200},
		"too many":      {429, `{"error":{"message":"slow down"}}`, "p0", 429},
		"a response that is lost": {404, `{"error":{"message":"Response with id 'r' not found.","type":` +
			`"invalid_request_error","param":"response_id","code":404}}`, "p0", 404},
		"SGLang": {400, `{"message":"The following requested LoRA adapters are not loaded: a\n"}`,
			"p0 p1 d0", 200},
		"SGLang without LoRA": {400, `{"message":"LoRA adapter 'a' was requested, but LoRA is not enabled."}`,
			"p0 p1 d0", 200},
		"another key":            {401, `{"error":"Unauthorized"}`, "p0 p1 d0", 200},
		"the client's wrong key": {401, `{"error":"Unauthorized"}`, "p0 p1", 401},
		"an API switched off":    {501, unsupported, "p0 p1 d0", 200},
		"nobody has the API":     {501, unsupported, "p0 p1", 501},
		"nobody has the model":   {404, vllm(lost, "NotFoundError", `"model"`), "p0 p1 p2", 404},
		"another 404":            {404, vllm("Response not found.", "NotFoundError", `"response_id"`), "p0", 404},
		"a bad request":          {400, vllm("temperature must not be", "BadRequestError", `"temperature"`), "p0", 400},
		"too long for all": {400, vllm("This model's maximum context length is 9 tokens. However", "BadRequestError",
			`"input_tokens"`), "p0", 400},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeFleet(t, &fake{}, "p0 p1 p2 d0", config.Retry{MaxAttempts: 1},
					func(host string, _ int) response {
						if host == "p0" || c.want != 200 && host[0] == 'p' {
							return saysNo(c.status, c.body)
						}
						return replies(200)
					})
				status := 200
				if err := f.do(`{"model":"a","prompt":"hi"}`); err != nil {
					e := new(pdflow.Error)
					require.ErrorAs(t, err, &e)
					status = e.HTTPStatus()
				}
				assert.Equal(t, c.legs, f.hosts())
				assert.Equal(t, c.want, status)
			})
		})
	}
}

// Who sends one new name after another must not have all engines asked for each.
func TestAFloodOfNamesIsNotMultiplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 p1 p2 p3 p4 p5 p6 p7 d0", config.Retry{MaxAttempts: 1},
			func(string, int) response {
				return saysNo(404, `{"error":{"message":"The model is unknown","code":"model_not_found"}}`)
			})
		for i := range 200 {
			require.Error(t, f.do(fmt.Sprintf(`{"model":"m%d","prompt":"hi"}`, i)))
		}
		assert.LessOrEqual(t, len(f.sent()), 2*200+100, "two each, and a hundred a second besides")
		time.Sleep(time.Second)
		before := len(f.sent())
		require.Error(t, f.do(`{"model":"another","prompt":"hi"}`))
		assert.Len(t, f.sent(), before+8, "a single name is looked for everywhere")
	})
}

// P and D may be launched with contexts of different lengths.
func TestAPromptThatOnlyOneEngineHasRoomForIsServedThere(t *testing.T) {
	for name, c := range map[string]struct {
		known bool
		want  int
	}{"known": {true, 200}, "not known": {false, 400}} {
		t.Run(name, func(t *testing.T) {
			p, d, err := enginesim.Pair(enginesim.Config{MaxModelLen: 512}, enginesim.Config{MaxModelLen: 4096})
			require.NoError(t, err)
			t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
			eps := []discovery.Endpoint{endpoint(t, p.URL(), discovery.RolePrefill),
				endpoint(t, d.URL(), discovery.RoleDecode)}
			if c.known {
				eps[0].Attributes = map[string]string{"maxModelLen": "512"}
				eps[1].Attributes = map[string]string{"maxModelLen": "4096"}
			}
			flow, seen := newFlow(t, nil, eps, pdflow.WithFallback(config.FallbackDecode))
			r := post(t, serve(t, flow), "/v1/completions",
				`{"prompt":"`+strings.Repeat("long ", 200)+`","max_tokens":4}`)
			require.Equal(t, c.want, r.status, r.body)
			if c.known {
				require.Equal(t, pdflow.ModeFallback, seen.list()[len(seen.list())-1].Mode)
			}
		})
	}
}

// Nobody can count the tokens of a text without a tokenizer. So an engine may refuse it as too long, and then those are
// asked that have a longer context than it, and no others: they would refuse it, too.
func TestAPromptTooLongForAnEngineGoesToLongerContexts(t *testing.T) {
	const tooLong = `{"error":{"message":"This model's maximum context length is 9 tokens.","param":"input_tokens"}}`
	for name, c := range map[string]struct {
		engines string // with the lengths of their contexts
		p, d    int    // tokens for which the engines must have room
		legs    string
		want    int
	}{
		"a longer pair":              {"p0:500 d0:500 p1:4000 d1:4000", 2000, 2000, "p0 p1 d1", 200},
		"step by step":               {"p0:500 p1:1000 p2:2000 p3:4000 d0:4000", 3000, 3000, "p0 p1 p2 p3 d0", 200},
		"all are alike":              {"p0:500 d0:500 p1:500 d1:500", 2000, 2000, "p0", 400},
		"all are too short":          {"p0:500 d0:500 p1:1000 d1:1000", 2000, 2000, "p0 p1", 400},
		"no other prefill is longer": {"p0:500 p1:500 d0:4000", 2000, 2000, "p0", 400},
		"the limit of tokens":        {"p0:500 d0:500 p1:500 d1:4000", 1, 2000, "p0 d0 p1 d1", 200},
		"a length is not known":      {"p0:500 d0:500 p1 d1", 2000, 2000, "p0 p1 d1", 200},
		"no length is known":         {"p0 p1 d0", 1 << 20, 1 << 20, "p0", 400},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				length := map[string]int{}
				for engine := range strings.FieldsSeq(c.engines) {
					id, n, _ := strings.Cut(engine, ":")
					length[id] = 1 << 16
					if n != "" {
						length[id], _ = strconv.Atoi(n)
					}
				}
				once := config.Retry{MaxAttempts: 1}
				f := newFakeFleet(t, &fake{}, c.engines, once, func(host string, _ int) response {
					if host[0] == 'p' && length[host] < c.p || host[0] == 'd' && length[host] < c.d {
						return saysNo(400, tooLong)
					}
					return replies(200)
				})
				status := 200
				if err := f.do(`{"model":"a","prompt":"hi"}`); err != nil {
					e := new(pdflow.Error)
					require.ErrorAs(t, err, &e)
					status = e.HTTPStatus()
				}
				assert.Equal(t, c.legs, f.hosts())
				assert.Equal(t, c.want, status)
			})
		})
	}
}

func saysNo(status int, body string) response {
	return func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}},
			ContentLength: int64(len(body)), Body: io.NopCloser(strings.NewReader(body))}, nil
	}
}
