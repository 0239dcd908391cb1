// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// Errors have the shape that the client of each API understands.

// refuses is an engine that answers with an error of its own.
func refuses(code int, body string) handler {
	return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_, _ = w.Write([]byte(body))
	}
}

func TestErrorsHaveTheShapeOfTheClientsAPI(t *testing.T) {
	x := script(t, &fake{}, refuses(500, `{"error":"oom"}`), answer(ok), pdflow.WithMaxBody(1000))
	for _, c := range []struct {
		name, body, header string
		status             int
		openai, anthropic  string
	}{
		{"not JSON", `{`, "application/json", 400, "invalid_request_error", "invalid_request_error"},
		{"too large", `{"a":"` + strings.Repeat("a", 2000) + `"}`, "application/json", 413,
			"invalid_request_error", "request_too_large"},
		{"media type", `{}`, "text/plain", 415, "invalid_request_error", "invalid_request_error"},
		{"an engine's failure", `{"messages":[],"prompt":"a","input":"a","input_ids":[1],"token_ids":[1],` +
			`"sampling_params":{},"max_tokens":4}`, "application/json", 502, "api_error", "api_error"},
	} {
		for _, api := range connector.APIs() {
			t.Run(c.name+", "+api.String(), func(t *testing.T) {
				r := post(t, x.url, api.Path(), c.body, "Content-Type", c.header)
				require.Equal(t, c.status, r.status, r.body)
				require.NotEmpty(t, gjson.Get(r.body, "error.message").String())
				if api == connector.APIMessages {
					require.Equal(t, "error", gjson.Get(r.body, "type").String(), r.body)
					require.Equal(t, c.anthropic, gjson.Get(r.body, "error.type").String())
					require.False(t, gjson.Get(r.body, "error.code").Exists())
					return
				}
				require.False(t, gjson.Get(r.body, "type").Exists(), r.body)
				require.Equal(t, c.openai, gjson.Get(r.body, "error.type").String())
				require.NotEmpty(t, gjson.Get(r.body, "error.code").String())
			})
		}
	}
	for path, anthropic := range map[string]bool{"/v1/messages/count_tokens": true, "/v1/embeddings": false} {
		r := post(t, x.url, path, `{}`)
		require.Equal(t, 404, r.status)
		require.Equal(t, anthropic, gjson.Get(r.body, "type").String() == "error", r.body)
	}
}

// Each status has one type in Anthropic's API. Clients decide by the type whether to retry.
func TestAnthropicsErrorTypes(t *testing.T) {
	for status, want := range map[int]string{400: "invalid_request_error", 401: "authentication_error",
		403: "permission_error", 404: "not_found_error", 413: "request_too_large", 422: "invalid_request_error",
		429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 529: "overloaded_error"} {
		own := `{"error":{"message":"the engine's words","type":"own","param":null,"code":1}}`
		x := script(t, &fake{}, answer(ok), refuses(status, own))
		r := post(t, x.url, "/v1/messages", `{"messages":[],"max_tokens":4}`)
		require.Equal(t, status, r.status)
		require.JSONEq(t, `{"type":"error","error":{"type":"`+want+`","message":"the engine's words"}}`, r.body)
	}
	x := start(t, setup{noEndpoints: true})
	r := post(t, x.url, "/v1/messages", `{"messages":[],"max_tokens":4}`)
	require.Equal(t, 503, r.status)
	require.Equal(t, "1", r.header.Get("Retry-After"))
	require.Equal(t, "overloaded_error", gjson.Get(r.body, "error.type").String())
}

// A client gets an engine's error in the shape of its own API.
func TestAnEnginesErrorTakesTheShapeOfTheClientsAPI(t *testing.T) {
	anthropic := `{"type": "error", "error": {"type": "BadRequestError", "message": "m"}}`
	ours := `{"type":"error","error":{"type":"invalid_request_error","message":"the engine refused the request"}}`
	openai := `{"error": {"message": "m", "type": "BadRequestError", "param": null, "code": 400}}`
	for _, c := range []struct{ path, body, want string }{
		{"/v1/messages", anthropic, anthropic},
		{"/v1/messages", `{"message":"m"}`, `{"type":"error","error":{"type":"invalid_request_error","message":"m"}}`},
		{"/v1/messages", `{"detail":[]}`, ours},
		{"/v1/completions", openai, openai},
		{"/v1/completions", `{"detail":[]}`, `{"error":{"message":"the engine refused the request",` +
			`"type":"invalid_request_error","param":null,"code":"decode_rejected"}}`},
		{"/inference/v1/generate", openai, openai},
	} {
		x := script(t, &fake{}, answer(ok), refuses(400, c.body))
		r := post(t, x.url, c.path, `{"messages":[],"prompt":"a","max_tokens":4,"token_ids":[1],"sampling_params":{}}`)
		require.Equal(t, 400, r.status)
		require.JSONEq(t, c.want, r.body)
	}
}

// A host with paths of its own calls Do, which knows the API, and then WriteError.
func TestErrorsOfDoKnowTheirAPI(t *testing.T) {
	x := start(t, setup{noEndpoints: true})
	for name, in := range map[string]*pdflow.Request{
		"no engine":  {Body: []byte(`{"messages":[],"max_tokens":4}`)},
		"no JSON":    {Body: []byte(`{`)},
		"request id": {Body: []byte(`{"messages":[],"max_tokens":4}`), RequestID: "a b"},
	} {
		in.API = connector.APIMessages
		_, err := x.flow.Do(t.Context(), in)
		var e *pdflow.Error
		require.ErrorAs(t, err, &e, name)
		w := httptest.NewRecorder()
		e.Send(w, httptest.NewRequest(http.MethodPost, "/mine", nil))
		require.Equal(t, "error", gjson.Get(w.Body.String(), "type").String(), name)
	}
}

// What an engine says of a fault passes without addresses, and without members that no API has.
func TestAnEnginesErrorTellsNoAddress(t *testing.T) {
	const body = `{"error":{"message":"no route to http://10.0.0.7:8100/kv or prefill-0.pods.local",` +
		`"type":"t","param":"p","code":7,"peer":"10.0.0.7"},"host":"10.0.0.7"}`
	const want = `{"error":{"message":"no route to (address) or (address)","type":"t","param":"p","code":7}}`
	event := func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = w.Write([]byte("data: " + body + "\n\n"))
	}
	for name, c := range map[string]struct {
		p, d handler
		want int
	}{
		"P refuses":                  {refuses(400, body), answer(ok), 400},
		"D refuses":                  {answer(ok), refuses(400, body), 400},
		"D fails":                    {answer(ok), refuses(500, body), 500},
		"D fails in its first event": {answer(ok), event, 500},
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{}, c.p, c.d)
			r := post(t, x.url, "/v1/completions", completion("a", ""))
			require.Equal(t, c.want, r.status)
			require.JSONEq(t, want, r.body)
			r = post(t, x.url, "/v1/messages", `{"messages":[],"max_tokens":4}`)
			require.Equal(t, "no route to (address) or (address)", gjson.Get(r.body, "error.message").String())
			require.NotContains(t, r.body, "10.0.0.7")
		})
	}
	late := func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = w.Write([]byte(`data: {"choices":[{"text":"a"}]}` + "\n\n"))
		_ = http.NewResponseController(w).Flush()
		_, _ = w.Write([]byte("event: error\ndata: " + body + "\n\ndata: {}\n\n"))
	}
	x := script(t, &fake{}, answer(ok), late)
	for _, path := range []string{"/v1/chat/completions", "/v1/messages"} {
		r := post(t, x.url, path, `{"messages":[],"max_tokens":4,"stream":true}`)
		require.Contains(t, r.body, `{"choices":[{"text":"a"}]}`)
		require.Contains(t, r.body, "no route to (address) or (address)", path)
		require.NotContains(t, r.body, "10.0.0.7", path)
	}
	detail := script(t, &fake{}, refuses(404, `{"detail":"nothing at 10.0.0.7"}`), answer(ok))
	r := post(t, detail.url, "/v1/completions", completion("a", ""))
	require.Equal(t, 404, r.status)
	require.NotContains(t, r.body, "10.0.0.7")
	require.Equal(t, "prefill_rejected", gjson.Get(r.body, "error.code").String())
}

// Engines that the request never saw are not named either, however the engine spells their names, and however it spells
// the event that does so.
func TestNoErrorNamesAnEngineOfTheSet(t *testing.T) {
	const said = "cannot reach prefill_9, llm/prefill-8:8100, rank-7, fd00::7:8100 or /opt/engine/kv.py"
	const want = "cannot reach (address), (address), (address), (address) or (address)"
	first, second := endpoint(t, "http://prefill_9:8100", discovery.RolePrefill), endpoint(t, "http://10.0.0.8:8100",
		discovery.RolePrefill)
	first.Phase, second.Phase = discovery.PhaseNotReady, discovery.PhaseNotReady
	second.ID, second.Attributes = "llm/prefill-8", map[string]string{"engineID": "rank-7"}
	for name, event := range map[string]string{
		"as engines write it":  `data: {"error":{"message":"` + said + `"}}`,
		"with spaces":          `data: { "error" : {"message":"` + said + `"}}`,
		"without a space":      `data:{"error":{"message":"` + said + `"}}`,
		"not the first member": `data: {"id":"x","choices":[],"error":{"message":"` + said + `"}}`,
		"by its name":          "event: error\ndata: {\"message\":\"" + said + `"}`,
		"of older engines":     `data: {"object":"error","message":"` + said + `"}`,
		"a response's end":     `data: {"type":"response.failed","response":{"error":{"message":"` + said + `"}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = io.WriteString(w, `data: {"choices":[{"text":"a"}]}`+"\n\n"+event+"\n\n")
			})
			flow, _ := newFlow(t, &fake{}, []discovery.Endpoint{x.pair.Prefill, x.pair.Decode, first, second})
			r := post(t, serve(t, flow), "/v1/chat/completions", `{"messages":[],"max_tokens":4,"stream":true}`)
			require.Contains(t, r.body, `"message":"`+want+`"`)
			require.NotContains(t, r.body, "prefill")
		})
	}
}
