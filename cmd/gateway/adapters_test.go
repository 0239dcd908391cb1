// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
)

// Two base models, each with an adapter on one of its two pairs. A request that names an adapter reaches the pair that
// has loaded it; which one that is changes while the gateway runs.
func TestRequestsNameAdapters(t *testing.T) {
	config := gatewayYAML("")
	engines := map[string][]*enginesim.Engine{} // p0, d0, p1, d1 of each model
	for _, model := range []string{"m", "n"} {
		var entries []string
		for range 2 {
			p, d, err := enginesim.Pair(enginesim.Config{Model: model}, enginesim.Config{})
			require.NoError(t, err)
			t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
			engines[model] = append(engines[model], p, d)
			entries = append(entries, entry(p.URL(), "prefill", nil), entry(d.URL(), "decode", nil))
		}
		config += serverYAML(model, "  kvConnector: {type: nixl}\n", entries...)
	}
	load := func(model, adapter string, pair int, loaded bool) {
		for _, e := range engines[model][2*pair : 2*pair+2] {
			if loaded {
				e.LoadAdapter(adapter)
			} else {
				e.UnloadAdapter(adapter)
			}
		}
	}
	load("m", "m-lora", 1, true)
	load("n", "n-lora", 0, true)
	g := start(t, config)
	ask := func(model string) (status int, response string) {
		status, _, response = g.complete(`{"model":"` + model + `","prompt":"hello","max_tokens":4}`)
		return status, response
	}
	for _, model := range []string{"m-lora", "n-lora"} {
		eventually(t, func() bool { status, _ := ask(model); return status == http.StatusOK }, model)
		for range 10 {
			status, response := ask(model)
			require.Equal(t, http.StatusOK, status, response)
			require.Contains(t, response, `"model":"`+model+`"`)
		}
	}
	before := engines["m"][0].Stats().Requests
	status, response := ask("x-lora")
	assert.Equal(t, http.StatusNotFound, status, response)
	assert.Equal(t, before, engines["m"][0].Stats().Requests, "no engine is asked for a name that none has listed")
	_, _, list := do(t, http.MethodGet, g.client+"/v1/models", "")
	assert.Contains(t, list, `"m-lora"`)

	load("m", "m-lora", 1, false) // moved to the other pair
	load("m", "m-lora", 0, true)
	for range 10 {
		status, response := ask("m-lora")
		require.Equal(t, http.StatusOK, status, response)
	}
	load("n", "n-lora", 0, false)
	gone, _ := ask("n-lora")
	assert.Equal(t, http.StatusNotFound, gone, "nobody has it any more")
}

// The engines of two base models stand behind something that lists the models and adapters of both, as routers do. An
// adapter goes where its parent is, by the engines' name for that: not to the model that comes first in the alphabet.
func TestAnAdapterBelongsToItsParentAlone(t *testing.T) {
	config := gatewayYAML("")
	engines := map[string]*enginesim.Engine{} // D of each model
	for model, other := range map[string]string{"m": "n", "n": "m"} {
		launched := enginesim.Config{Model: model, Adapters: []string{model + "-lora"},
			ListedToo: map[string][]string{other: {other + "-lora"}}}
		p, d, err := enginesim.Pair(launched, launched)
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
		engines[model] = d
		public := "big-" + other // so that the alphabet of the public names is not that of the engines'
		config += serverYAML(public, "  modelNames: {"+public+": "+model+"}\n  kvConnector: {type: nixl}\n",
			entry(p.URL(), "prefill", nil), entry(d.URL(), "decode", nil))
	}
	g := start(t, config)
	for model, d := range engines {
		eventually(t, func() bool {
			status, _, _ := g.complete(`{"model":"` + model + `-lora","prompt":"hello","max_tokens":4}`)
			return status == http.StatusOK
		}, model)
		before := d.Stats().Requests
		for range 10 {
			status, _, response := g.complete(`{"model":"` + model + `-lora","prompt":"hello","max_tokens":4}`)
			require.Equal(t, http.StatusOK, status, response)
			require.Contains(t, response, `"model":"`+model+`-lora"`)
		}
		assert.GreaterOrEqual(t, d.Stats().Requests, before+10)
	}
	_, _, metrics := do(t, http.MethodGet, g.admin+"/metrics", "")
	assert.NotContains(t, metrics, `pd_reason="elsewhere"`, "no engine was asked for an adapter of the other model")
}

// SGLang takes an adapter's name in place of its model's for the base model's: both legs must ask for the adapter in
// SGLang's own way (sgl-project/sglang issue 11551).
func TestAnAdapterOfSGLangIsAskedForInItsWay(t *testing.T) {
	launched := enginesim.Config{Model: "m", Adapters: []string{"sql"}, Connector: "sglang"}
	p, d := simPair(t, launched, launched)
	bootstrap, _ := bootstrapPort(p, d)
	g := start(t, gatewayYAML("")+serverYAML("m", "  kvConnector: {type: sglang}\n",
		entry(p.URL(), "prefill", bootstrap), as("decode", d)))
	eventually(t, func() bool {
		status, _, _ := g.complete(`{"model":"sql","prompt":"hello","max_tokens":4}`)
		return status == http.StatusOK
	}, "listed")
	status, _, _ := g.complete(`{"model":"m","prompt":"hello","max_tokens":4}`)
	require.Equal(t, http.StatusOK, status)
	for _, e := range []*enginesim.Engine{p, d} {
		asked := map[string]bool{}
		for _, r := range e.Requests() {
			asked[gjson.GetBytes(r.Body, "model").Str+"/"+gjson.GetBytes(r.Body, "lora_path").Str] = true
		}
		assert.Equal(t, map[string]bool{"sql/sql": true, "m/": true}, asked)
	}
}
