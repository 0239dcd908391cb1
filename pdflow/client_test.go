// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// What the client sees: ids, headers, transfer members, requests that two engines cannot serve, models.

func TestRequestIDs(t *testing.T) {
	x := start(t, setup{})
	for _, c := range []struct {
		name, sent string
		kept       bool
	}{
		{"plain", "abc-1_2.3:4", true},
		{"128 characters", strings.Repeat("a", 128), true},
		{"129 characters", strings.Repeat("a", 129), false},
		{"a space", "a b", false},
		{"an address of P2pNccl", "x___prefill_addr_1.2.3.4:5", false},
		{"none", "", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := len(x.p.Requests())
			var header []string
			if c.sent != "" {
				header = []string{"X-Request-Id", c.sent}
			}
			r := post(t, x.url, "/v1/completions", completion(longPrompt, ""), header...)
			require.Len(t, r.header.Values("X-Request-Id"), 1)
			id := r.header.Get("X-Request-Id")
			require.Equal(t, c.kept, id == c.sent)
			require.NotEmpty(t, id)
			p, d := x.p.Requests(), x.d.Requests()
			require.Greater(t, len(p), before)
			require.Equal(t, []string{id}, p[len(p)-1].Header["X-Request-Id"])
			require.Equal(t, []string{id}, d[len(d)-1].Header["X-Request-Id"])
		})
	}
}

func TestHeadersToEnginesAreAnAllowList(t *testing.T) {
	x := start(t, setup{opts: []pdflow.Option{pdflow.WithForwardHeaders("X-Tenant")}})
	post(t, x.url, "/v1/completions", completion(longPrompt, ""), "Authorization", "Bearer k", "Accept", "text/x",
		"User-Agent", "ua", "X-Session-ID", "s",
		"X-Vllm-Priority", "3", "traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate",
		"a=b", "X-Tenant", "t", "X-Api-Key", "sk", "anthropic-version", "2023-06-01", "anthropic-beta", "b",
		"OpenAI-Organization", "org", "OpenAI-Project", "p",
		"Cookie", "c=1", "Accept-Encoding", "gzip", "X-data-parallel-rank", "7", "X-Forwarded-For", "1.2.3.4", "Expect",
		"100-continue", "Te", "trailers")
	for _, leg := range []http.Header{x.p.Requests()[0].Header, x.d.Requests()[0].Header} {
		for name, want := range map[string]string{"Authorization": "Bearer k", "Accept": "text/x", "User-Agent": "ua",
			"X-Session-Id": "s", "X-Vllm-Priority": "3",
			"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Tracestate": "a=b",
			"Content-Type": "application/json", "X-Tenant": "t", "X-Api-Key": "sk", "Anthropic-Version": "2023-06-01",
			"Anthropic-Beta": "b", "Openai-Organization": "org", "Openai-Project": "p"} {
			require.Equal(t, []string{want}, leg[name], name)
		}
		for _, name := range []string{"Cookie", "Accept-Encoding", "X-Data-Parallel-Rank", "X-Forwarded-For", "Expect",
			"Te"} {
			require.NotContains(t, leg, name)
		}
	}
	for _, name := range []string{"cookie", "x-override-bootstrap-room"} {
		_, err := pdflow.New(&fake{}, pickNothing, pdflow.WithForwardHeaders(name))
		require.Error(t, err, name)
	}
}

func TestTransferMembersOfAClientAreRemoved(t *testing.T) {
	x := start(t, setup{})
	evil := `{"do_remote_prefill":true,"remote_engine_id":"evil","remote_host":"evil.example","remote_port":1,` +
		`"remote_request_id":"evil","remote_block_ids":[[1]]}`
	body := completion(longPrompt, `"kv_transfer_params":`+evil+
		`,"bootstrap_host":"evil","bootstrap_port":1,"bootstrap_room":2,"disaggregated_params":{"x":"evil"},`+
		`"ec_transfer_params":{"x":"evil"},"vllm_xargs":{"kv_transfer_params":`+evil+
		`,"keep":1},"request_id":"evil","other":"kept"`)
	require.Equal(t, alone(t, "/v1/completions", completion(longPrompt, "")),
		post(t, x.url, "/v1/completions", body).text(t))
	for _, leg := range [][]byte{x.p.Requests()[0].Body, x.d.Requests()[0].Body} {
		require.NotContains(t, string(leg), "evil")
		require.Contains(t, string(leg), `"vllm_xargs":{"keep":1}`)
		require.Contains(t, string(leg), `"other":"kept"`)
	}
}

func TestTheDecodeLegIsTheClientsBodyButForTheHandoff(t *testing.T) {
	x := start(t, setup{})
	body := "{ \"max_tokens\" : 8,\n\t\"prompt\":\"caf\\u00e9 " + longPrompt +
		"\", \"seed\": 9007199254740993, \"unknown\": {\"b\":1.50,\"a\":[ ]}, \"temperature\":0.0 ,\"model\":\"tiny\"}"
	require.Equal(t, 200, post(t, x.url, "/v1/completions", body).status)
	got := string(x.d.Requests()[0].Body)
	before, after, found := strings.Cut(got, `"kv_transfer_params":`)
	require.True(t, found)
	require.Equal(t, strings.TrimSuffix(body, "}"), strings.TrimSuffix(before, ","))
	require.True(t, json.Valid([]byte(strings.TrimSuffix(after, "}"))))
}

func TestWhatTwoEnginesCannotCarry(t *testing.T) {
	requests := map[string]string{
		"prompt":          `{"model":"tiny","prompt":["` + longPrompt + `","b"],"max_tokens":4}`,
		"n":               `{"model":"tiny","prompt":"` + longPrompt + `","max_tokens":4,"n":2,"temperature":0.8}`,
		"prompt_logprobs": `{"model":"tiny","prompt":"` + longPrompt + `","max_tokens":4,"prompt_logprobs":1}`,
		"use_beam_search": `{"model":"tiny","prompt":"` + longPrompt + `","max_tokens":4,"use_beam_search":true}`,
	}
	x := start(t, setup{})
	strict := start(t, setup{opts: []pdflow.Option{pdflow.WithUnsupported(config.UnsupportedRefuse)}})
	for member, body := range requests {
		t.Run(member, func(t *testing.T) {
			before := len(x.d.Requests())
			r := post(t, x.url, "/v1/completions", body)
			require.Equal(t, "aggregated", r.header.Get("X-PD-Mode"))
			require.Empty(t, x.p.Requests())
			require.Len(t, x.d.Requests(), before+1)
			require.Equal(t, body, string(x.d.Requests()[before].Body))

			r = post(t, strict.url, "/v1/completions", body)
			require.Equal(t, 400, r.status)
			message, _ := r.fault(t)
			require.Contains(t, message, member)
			require.Empty(t, strict.d.Requests())
		})
	}
}

func TestABothEndpointServesAlone(t *testing.T) {
	x := start(t, setup{noEndpoints: true})
	flow, _ := newFlow(t, nil, []discovery.Endpoint{endpoint(t, x.d.URL(), discovery.RoleBoth)})
	r := post(t, serve(t, flow), "/v1/completions", completion(longPrompt, ""))
	require.Equal(t, alone(t, "/v1/completions", completion(longPrompt, "")), r.text(t))
	require.Equal(t, "aggregated", r.header.Get("X-PD-Mode"))
}

func TestFallbackToDecodeWhenNobodyPrefills(t *testing.T) {
	x := start(t, setup{noEndpoints: true})
	flow, _ := newFlow(t, nil, []discovery.Endpoint{endpoint(t, x.d.URL(), discovery.RoleDecode)},
		pdflow.WithFallback(config.FallbackDecode))
	r := post(t, serve(t, flow), "/v1/completions", completion(longPrompt, `"stream":true`))
	require.Equal(t, alone(t, "/v1/completions", completion(longPrompt, "")), r.text(t))
	require.Equal(t, "fallback", r.header.Get("X-PD-Mode"))
}

// onlyDecode names no prefill engine.
func onlyDecode(ctx context.Context, inner pdflow.Picker, in *pdflow.PickInput) (pdflow.Pick, error) {
	chosen, err := inner.Pick(ctx, in)
	chosen.Prefill = discovery.Endpoint{}
	return chosen, err
}

// The attempt before the fallback is not the request's last, also where the picker had one engine serve it alone.
func TestAnAttemptAloneBeforeTheFallbackIsNotFinal(t *testing.T) {
	fails := status(http.StatusInternalServerError)
	x := script(t, &fake{}, fails, fails)
	seen := &outcomes{}
	flow, err := pdflow.New(&fake{},
		around{pick.New(setOf(t, x.pair.Prefill, x.pair.Decode), pick.RoundRobin()), onlyDecode},
		pdflow.WithFallback(config.FallbackDecode), pdflow.WithRetry(config.Retry{MaxAttempts: 1}),
		pdflow.WithObserver(pdflow.Observer{SessionEnd: seen.SessionEnd}))
	require.NoError(t, err)
	_, err = flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`)})
	require.ErrorIs(t, err, pdflow.CodeDecodeFailed)
	require.NoError(t, flow.Shutdown(t.Context()))
	o := seen.list()
	require.Len(t, o, 2)
	require.Equal(t, []bool{false, true}, []bool{o[0].Final, o[1].Final})
	require.Equal(t, []pdflow.Mode{pdflow.ModeAggregated, pdflow.ModeFallback}, []pdflow.Mode{o[0].Mode, o[1].Mode})
}

func TestFallbackToAnotherFlow(t *testing.T) {
	x := start(t, setup{})
	other, _ := newFlow(
		t, &fake{}, []discovery.Endpoint{endpoint(t, x.p.URL(), discovery.RolePrefill),
			endpoint(t, x.d.URL(), discovery.RoleDecode)},
	)
	flow, seen := newFlow(t, nil, nil, pdflow.WithFallback(config.FallbackConnector, other))
	r := post(t, serve(t, flow), "/v1/completions", completion(longPrompt, ""))
	require.Equal(t, alone(t, "/v1/completions", completion(longPrompt, "")), r.text(t))
	require.Equal(t, "fallback", r.header.Get("X-PD-Mode"))
	require.Empty(t, seen.list())
	require.Empty(t, flow.Sessions(), "the first flow still counts the request")
}

// A fallback flow may have a fallback flow itself. After the request's end none of the flows may still count it as in
// flight: otherwise Shutdown would never return.
func TestAChainOfFallbacksLeavesNothing(t *testing.T) {
	x := start(t, setup{prefill: atOwnPorts(t, enginesim.Config{})})
	last, _ := newFlow(
		t, &fake{}, []discovery.Endpoint{endpoint(t, x.p.URL(), discovery.RolePrefill),
			endpoint(t, x.d.URL(), discovery.RoleDecode)},
	)
	flows := []*pdflow.Flow{last}
	for range 3 {
		next, _ := newFlow(t, nil, nil, pdflow.WithFallback(config.FallbackConnector, flows[len(flows)-1]))
		flows = append(flows, next)
	}
	url := serve(t, flows[len(flows)-1])
	for _, stream := range []string{"", `"stream":true`} {
		r := post(t, url, "/v1/completions", completion(longPrompt, stream))
		require.Equal(t, alone(t, "/v1/completions", completion(longPrompt, "")), r.text(t))
		require.Equal(t, "fallback", r.header.Get("X-PD-Mode"))
	}
	for i, f := range flows {
		require.Empty(t, f.Sessions(), "flow %d still counts a request", i)
	}
	require.NoError(t, x.p.Close())
	require.Equal(t, 502, post(t, url, "/v1/completions", completion(longPrompt, "")).status)
	for i, f := range flows {
		require.Empty(t, f.Sessions(), "flow %d still counts a request that failed", i)
	}
}

func TestMuxRoutesByModel(t *testing.T) {
	a, b := start(t, setup{}), start(t, setup{})
	mux := newMux(t)
	url := serve(t, mux)
	ask := func(model string) int {
		return post(t, url, "/v1/completions", `{"prompt":"abc","max_tokens":2`+model+`}`).status
	}
	require.NoError(t, mux.SetRoutes(nil))
	require.Equal(t, 404, ask(`,"model":"tiny"`))

	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"tiny": a.flow}))
	require.Equal(t, 200, ask(`,"model":"tiny"`))
	require.Equal(t, 200, ask(``), "the only model serves a request without one")
	require.Equal(t, 404, ask(`,"model":"other"`))

	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"tiny": a.flow, "big": b.flow}))
	require.Equal(t, 404, ask(``), "two models, and none for all")
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"other": a.flow, "*": b.flow}))
	before := len(b.p.Requests())
	require.Equal(t, 200, ask(`,"model":null`))
	require.Equal(t, 200, ask(`,"model":"tiny"`))
	require.Len(t, b.p.Requests(), before+2)
	require.Error(t, mux.SetRoutes(map[string]pdflow.Server{"": a.flow, "*": b.flow}))
	require.Error(t, mux.SetRoutes(map[string]pdflow.Server{"x": nil}))
}

// Until a host knows its models, clients are told to try again: 404 would be final. It is so from the start.
func TestModelsThatAreNotKnownYet(t *testing.T) {
	x := start(t, setup{})
	mux := newMux(t)
	url := serve(t, mux)
	ask := func(model string) reply {
		return post(t, url, "/v1/completions", `{"prompt":"abc","max_tokens":2`+model+`}`)
	}
	for _, routes := range []map[string]pdflow.Server{nil, {"tiny": x.flow, "*": pdflow.NotYet}} {
		if routes != nil {
			require.NoError(t, mux.SetRoutes(routes))
			require.Equal(t, 200, ask(`,"model":"tiny"`).status)
		}
		for _, model := range []string{"", `,"model":"other"`} {
			r := ask(model)
			require.Equal(t, 503, r.status)
			require.Equal(t, "1", r.header.Get("Retry-After"))
			require.Contains(t, r.body, `"code":"no_endpoint","message":"the models are not known yet"`)
		}
		require.ErrorIs(t, mux.Ready(t.Context()), pdflow.CodeNoEndpoint)
	}
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"tiny": x.flow}))
	require.Equal(t, 404, ask(`,"model":"other"`).status)
	require.NoError(t, mux.Ready(t.Context()))
}

func TestSplitSharesByRequestID(t *testing.T) {
	a, b := start(t, setup{}), start(t, setup{})
	split, err := a.flow.Split(b.flow, 30)
	require.NoError(t, err)
	mux := newMux(t)
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"": split}))
	url := serve(t, mux)
	for range 3 {
		require.Equal(t, 200, post(t, url, "/v1/completions", completion("abc", ""), "X-Request-Id", "stays").status)
	}
	require.Contains(t, []int{0, 3}, len(b.p.Requests()), "one id went to both")
	for i := range 200 {
		require.Equal(t, 200, post(t, url, "/v1/completions", completion("abc", ""), "X-Request-Id", "id-"+
			itoa(i)).status)
	}
	share := len(b.p.Requests())
	require.Greater(t, share, 30)
	require.Less(t, share, 95)
}

func TestMiddlewareHandsTheRestOn(t *testing.T) {
	x := start(t, setup{})
	url := serve(t, x.flow.Middleware(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
	})))
	require.Equal(t, 200, post(t, url, "/v1/completions", completion("abc", "")).status)
	require.Equal(t, http.StatusTeapot, post(t, url, "/v1/embeddings", "{}").status)
	resp, err := client.Get(url + "/v1/completions")
	require.NoError(t, err)
	resp.Body.Close()
	require.Equal(t, http.StatusTeapot, resp.StatusCode)
}

func TestDoForSchedulers(t *testing.T) {
	x := start(t, setup{noEndpoints: true})
	body := completion(longPrompt, `"stream":true`)
	done := 0
	pick := &pdflow.Pick{Prefill: endpoint(t, x.p.URL(), discovery.RolePrefill),
		Decode: endpoint(t, x.d.URL(), discovery.RoleDecode), Done: func(o *pdflow.Outcome) {
			done++
			require.Nil(t, o.Err)
			require.True(t, o.Final)
		}}
	resp, err := x.flow.Do(context.Background(),
		&pdflow.Request{API: connector.APICompletions, Body: []byte(body), Pick: pick})
	require.NoError(t, err)
	require.Equal(t, 0, done, "Done came before the stream's end")
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.NoError(t, resp.Body.Close())
	require.Equal(t, 1, done)
	require.Equal(t, alone(t, "/v1/completions", body),
		reply{status: resp.Status, header: resp.Header, body: string(b)}.text(t))

	_, err = x.flow.Do(context.Background(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`{`)})
	require.ErrorIs(t, err, pdflow.CodeInvalid)
	_, err = x.flow.Do(context.Background(), &pdflow.Request{API: connector.APICompletions, Body: []byte(body)})
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
}

func TestClosingABodyEarlyCancelsDecode(t *testing.T) {
	x := start(t, setup{})
	resp, err := x.flow.Do(context.Background(),
		&pdflow.Request{API: connector.APICompletions, Body: []byte(`{"model":"tiny","prompt":"` + longPrompt +
			`","max_tokens":20000,"stream":true}`)})
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, pdflow.CodeClientGone, x.seen.list()[0].Err.Code)
	x.idle()
}
