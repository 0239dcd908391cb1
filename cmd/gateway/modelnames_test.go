// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// Clients ask for gpt-4o and sql; the engines serve big and its adapter big-sql. The clients read no other names.
func TestClientsHaveNamesOfTheirOwn(t *testing.T) {
	p, d, err := enginesim.Pair(enginesim.Config{Model: "big", Adapters: []string{"big-sql"}},
		enginesim.Config{Adapters: []string{"big-sql"}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	yaml := func(names string) string {
		return gatewayYAML(", passthrough: decode") + serverYAML("gpt-4o", "  modelNames: {"+names+"}\n"+
			"  kvConnector: {type: nixl}\n  rollout: {weight: 50, kvConnector: {type: http}}\n",
			entry(p.URL(), "prefill", nil), entry(d.URL(), "decode", nil))
	}
	g := start(t, yaml("gpt-4o: big, gpt-4.1-mini: big, sql: big-sql"))
	ask := func(path, body, model string) (int, string) {
		status, _, response := do(t, http.MethodPost, g.client+path, `{"model":"`+model+`",`+body+`}`)
		return status, response
	}
	for path, body := range map[string]string{
		"/v1/chat/completions": `"max_tokens":3,"messages":[{"role":"user","content":"hi"}]`,
		"/v1/completions":      `"max_tokens":3,"prompt":"hi"`,
		"/v1/responses":        `"max_output_tokens":3,"input":"hi"`,
		"/v1/messages":         `"max_tokens":3,"messages":[{"role":"user","content":"hi"}]`,
	} {
		for _, model := range []string{"gpt-4o", "gpt-4.1-mini", "sql"} {
			for _, stream := range []string{"", `,"stream":true`} {
				status, response := ask(path, body+stream, model)
				require.Equal(t, http.StatusOK, status, response)
				assert.Contains(t, response, `"model":"`+model+`"`, path)
				assert.NotContains(t, response, "big", path)
			}
		}
	}
	for _, e := range []*enginesim.Engine{p, d} {
		for _, r := range e.Requests() {
			if r.Method == http.MethodPost {
				assert.Contains(t, []string{"big", "big-sql"}, gjson.GetBytes(r.Body, "model").Str)
			}
		}
	}
	_, _, list := do(t, http.MethodGet, g.client+modelsPath, "")
	assert.Equal(t, `["gpt-4.1-mini","gpt-4o","sql"]`, gjson.Get(list, "data.#.id").Raw, list)
	assert.Equal(t, `["gpt-4.1-mini"]`, gjson.Get(list, `data.#(id=="sql")#.parent`).Raw, list)
	assert.NotContains(t, list, "big")
	status, response := ask("/v1/completions", `"prompt":"hi"`, "big")
	assert.Equal(t, http.StatusNotFound, status, "a name that no client has: %s", response)
	status, response = ask("/v1/completions", `"prompt":"hi","max_tokens":0`, "gpt-4o")
	assert.Equal(t, http.StatusBadRequest, status, response)

	for _, e := range []*enginesim.Engine{p, d} {
		e.UnloadAdapter("big-sql")
	}
	status, response = ask("/v1/completions", `"prompt":"hi"`, "sql")
	assert.Equal(t, http.StatusNotFound, status)
	assert.Contains(t, response, "The model `sql` does not exist. Valid aliases: ")
	assert.NotContains(t, response, "big")

	g.shows(`gen_ai_request_model="gpt-4o"`)
	assert.NotContains(t, g.page("/metrics"), `model="big`)
	g.configure(yaml("gpt-4o: big, new: big"))
	eventually(t, func() bool {
		status, _ := ask("/v1/completions", `"prompt":"hi"`, "new")
		return status == http.StatusOK
	})
	status, _ = ask("/v1/completions", `"prompt":"hi"`, "gpt-4.1-mini")
	assert.Equal(t, http.StatusNotFound, status, "gone with a reload")
}

func TestNamesThatClash(t *testing.T) {
	one := func(model, more string) string {
		return serverYAML(model, more+"  kvConnector: {type: http}\n")
	}
	for name, k := range map[string]struct{ yaml, fault string }{
		"with a model": {one("m", "  modelNames: {n: m}\n") + one("n", ""),
			`spec.modelNames.n: is a name of another ModelServer too, on line 11`},
		"with a name": {one("m", "  modelNames: {gpt-4.1: m}\n") + one("n", "  modelNames: {gpt-4.1: n}\n"),
			`spec.modelNames["gpt-4.1"]: is a name of another ModelServer too, on line 5`},
		"with an adapter": {one("m", "  modelNames: {a: m}\n") + one("n", "  adapters: [a]\n"),
			`spec.modelNames.a: is a name of another ModelServer too`},
		"with an adapter of its own": {one("m", "  modelNames: {a: m}\n  adapters: [a]\n"),
			"spec.modelNames.a: is an adapter's own name, too"},
		"with the model of another name": {one("m", "  modelNames: {a: b, b: m}\n"),
			`spec.modelNames.a: is a name that stands for another model itself; write "m"`},
		"no name":     {one("m", "  modelNames: {a: \"\"}\n"), "spec.modelNames.a: is no name of a model"},
		"any":         {one("m", "  modelNames: {a: \"*\"}\n"), "spec.modelNames.a: is no name of a model"},
		"empty":       {one("m", "  modelNames: {\"\": m}\n"), "spec.modelNames: has an empty name"},
		"not a model": {one("m", "  modelNames: {a: 7}\n"), "spec.modelNames.a"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse("config.yaml", []byte(k.yaml))
			require.ErrorContains(t, err, k.fault)
		})
	}
	fine := one("m", "  modelNames: {m: big, gpt-4o: big, \"*\": big, big: big}\n  adapters: [x]\n") +
		one("n", "  modelNames: {x-n: x}\n")
	_, err := parse("config.yaml", []byte(fine))
	require.NoError(t, err)
}

// Of a cluster's objects one that has a name already keeps it.
func TestObjectsDoNotTakeEachOthersNames(t *testing.T) {
	model := func(spec string) *modelServer {
		m, err := modelserver.Read([]byte(`{"apiVersion":"networking.matrixinfer.ai/v1alpha1","kind":"ModelServer",` +
			`"spec":` + spec + `}`))
		require.NoError(t, err)
		return &modelServer{ModelServer: m}
	}
	taken := takenNames{}
	taken.take(model(`{"model":"m","modelNames":{"a":"big","*":"big","m":"big"}}`), "llm/m")
	for spec, why := range map[string]string{
		`{"model":"n","modelNames":{"b":"n","*":"n"}}`: "",
		`{"model":"m"}`:                        "spec.model is served by llm/m already",
		`{"model":"a"}`:                        "spec.model is served by llm/m already",
		`{"model":"n","modelNames":{"a":"n"}}`: "spec.modelNames.a is served by llm/m already",
		`{"model":"n","modelNames":{"m":"n"}}`: "spec.modelNames.m is served by llm/m already",
	} {
		if err := taken.by(model(spec)); why == "" {
			assert.NoError(t, err, spec)
		} else {
			assert.EqualError(t, err, why, spec)
		}
	}
}
