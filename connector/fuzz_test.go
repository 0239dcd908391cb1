// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

const fuzzHandoff = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[13,14]],` +
	`"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}`

// For any request nothing panics, valid JSON stays valid, no leg has a transfer member of the client, and both legs
// carry the prompt byte for byte.
func FuzzLegs(f *testing.F) {
	for _, body := range []string{
		`{"model":"m","messages":[{"role":"user","content":"h\u00e4"}],"max_completion_tokens":8,"stream":true,` +
			`"stream_options":{"include_usage":true}}`,
		`{"prompt":["a","b"],"max_tokens":2,"n":3,"best_of":4,"echo":true,"logprobs":1}`,
		`{"input":"x","max_output_tokens":7,"request_id":"r","truncation":"auto"}`,
		`{"messages":[],"max_tokens":2048,"thinking":{"type":"enabled","budget_tokens":1024}}`,
		`{"token_ids":[1,2],"sampling_params":{"max_tokens":3,"min_tokens":1,"extra_args":{"kv_transfer_params":{}}}}`,
		`{"text":"x","sampling_params":{"max_new_tokens":3},"bootstrap_room":1}`,
		`{"kv_transfer\u005fparams":{"do_remote_prefill":true},"vllm_xargs":{"kv_transfer_params":"x"},"a":1}`,
		` { "sampling_params" : null , "prompt" : [ [1] , [2] ] } `,
		`{"prompt":"a","prompt_embeds":[],"":1,"max_tokens":1e1}`,
	} {
		for api := range byte(8) {
			f.Add(api, []byte(body))
		}
	}
	n, err := nixl.New(nil)
	require.NoError(f, err)
	h, err := plainhttp.New(nil)
	require.NoError(f, err)
	response := &connector.PrefillResult{Status: http.StatusOK,
		Body: []byte(`{"kv_transfer_params":` + fuzzHandoff + `}`)}

	f.Fuzz(func(t *testing.T, apiByte byte, body []byte) {
		api := connector.API(apiByte)
		before := bytes.Clone(body)
		r, err := connector.ParseRequest(api, body)
		if err != nil {
			return
		}
		s := contract.NewSession(r, "id", discovery.Endpoint{}, discovery.Endpoint{})
		for _, c := range []connector.KVConnector{h, n} {
			_ = check.Of(c).CheckRequest(s.Request)
			prefill, decode := contract.NewPrefillLeg(r, c.Traits()), contract.NewLeg(r)
			require.NoError(t, c.Prefill(context.Background(), s, prefill))
			require.NoError(t, c.Decode(context.Background(), s, response, decode))
			checkFuzzedLeg(t, r, c, prefill, response)
			checkFuzzedLeg(t, r, c, decode, response)
		}
		require.Equal(t, before, body, "the client's body is never written to")
	})
}

func checkFuzzedLeg(t *testing.T, r *connector.ClientRequest, c connector.KVConnector, leg *connector.Leg,
	response *connector.PrefillResult) {
	t.Helper()
	out, err := contract.Body(leg)
	if r.API.Path() == "" && err != nil {
		return // an unknown API has no prefill leg
	}
	require.NoError(t, err)
	d, err := jsonedit.Parse(out)
	require.NoError(t, err, "the top level is well formed whatever stands below it")
	if json.Valid(r.Body()) { // what is malformed below the top level may have been in a member that is gone
		require.True(t, json.Valid(out), "%s", out)
	}

	for _, name := range []string{"ec_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port",
		"bootstrap_room", "request_id", "rid"} {
		_, ok := d.Get(name)
		require.False(t, ok, name)
	}
	params, ok := d.Get("kv_transfer_params")
	handoff, _ := response.Field("kv_transfer_params")
	switch {
	case c.Traits().Name == "http":
		require.False(t, ok)
	case ok && string(params) != string(handoff):
		require.True(t, gjson.GetBytes(params, "do_remote_decode").Bool(),
			"either P's handoff or the connector's own request for one: %s", params)
		require.False(t, gjson.GetBytes(params, "do_remote_prefill").Bool())
	}
	for _, holder := range []string{"vllm_xargs", "sampling_params"} {
		if raw, ok := d.Get(holder); ok && jsonedit.Kind(raw) == jsonedit.Object {
			inner, err := jsonedit.Parse(raw)
			require.NoError(t, err)
			_, left := inner.Get("kv_transfer_params")
			require.False(t, left, "%s in %s", raw, holder)
		}
	}
	for _, name := range []string{"model", "prompt", "messages", "input", "token_ids", "text", "input_ids",
		"prompt_embeds", "tools", "system", "chat_template"} {
		sent, was := jsonField(t, r.Body(), name)
		got, is := d.Get(name)
		require.Equal(t, was, is, name)
		require.Equal(t, string(sent), string(got), name)
	}
}

func jsonField(t *testing.T, body []byte, name string) ([]byte, bool) {
	t.Helper()
	d, err := jsonedit.Parse(body)
	require.NoError(t, err)
	return d.Get(name)
}
