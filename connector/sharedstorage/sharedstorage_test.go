// SPDX-License-Identifier: Apache-2.0

package sharedstorage_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/uncarried"
	"github.com/pdkit/pdkit/connector/sharedstorage"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, settings string) connector.KVConnector {
	t.Helper()
	c, err := connector.Open(config.Spec{Type: "sharedstorage", Config: json.RawMessage(settings)})
	require.NoError(t, err)
	return c
}

func session(t testing.TB, api connector.API, body string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return contract.NewSession(r, "id", discovery.Endpoint{}, discovery.Endpoint{})
}

func prefill(t testing.TB, c connector.KVConnector, s *connector.Session) string {
	t.Helper()
	l := contract.NewPrefillLeg(s.Request, c.Traits())
	require.NoError(t, c.Prefill(context.Background(), s, l))
	assert.Empty(t, contract.Leg(l).Headers)
	body, err := contract.Body(l)
	require.NoError(t, err)
	return string(body)
}

func decode(t testing.TB, c connector.KVConnector, s *connector.Session, p *connector.PrefillResult) string {
	t.Helper()
	l := contract.NewLeg(s.Request)
	require.NoError(t, c.Decode(context.Background(), s, p, l))
	assert.Empty(t, contract.Leg(l).Headers)
	body, err := contract.Body(l)
	require.NoError(t, err)
	return string(body)
}

var response = &connector.PrefillResult{Status: 200, Body: []byte(`{"kv_transfer_params":null}`), At: time.Now()}

func TestNothingIsOnTheWire(t *testing.T) {
	for _, k := range []struct {
		api                     connector.API
		client, prefill, decode string
	}{
		{connector.APICompletions, `{"model":"tiny","prompt":"x","max_tokens":24,` +
			`"kv_transfer_params":{"do_remote_prefill":true}}`,
			`{"model":"tiny","prompt":"x","max_tokens":1,"stream":false}`,
			`{"model":"tiny","prompt":"x","max_tokens":24}`},
		{connector.APIMessages, `{"max_tokens":2048,"thinking":{"type":"enabled","budget_tokens":1024}}`,
			`{"max_tokens":1,"stream":false}`, `{"max_tokens":2048,"thinking":{"type":"enabled",` +
				`"budget_tokens":1024}}`},
	} {
		c, s := open(t, ``), session(t, k.api, k.client)
		assert.Equal(t, k.prefill, prefill(t, c, s))
		assert.Equal(t, k.decode, decode(t, c, s, response))
	}
	c := open(t, `{}`)
	assert.Equal(t, "sharedstorage", c.Traits().Name)
	assert.Equal(t, connector.PrefillThenDecode, c.Traits().Order)
	assert.True(t, c.Traits().Handoff.ContentStore)
}

func TestAThresholdAsksDecodeFirst(t *testing.T) {
	c := open(t, `{"cacheHitThreshold":0.8}`)
	assert.Equal(t, connector.DecodeFirst, c.Traits().Order)
	s := session(t, connector.APIChat, `{"messages":[],"stream":true,"max_tokens":9}`)
	assert.Equal(t, `{"messages":[],"stream":true,"max_tokens":9,"cache_hit_threshold":0.8}`, decode(t, c, s, nil),
		"D may refuse")
	assert.Equal(t, `{"messages":[],"stream":false,"max_tokens":1,"cache_hit_threshold":0}`, prefill(t, c, s),
		"P must compute")
	assert.Equal(t, `{"messages":[],"stream":true,"max_tokens":9,"cache_hit_threshold":0}`, decode(t, c, s, response),
		"D may not refuse again")

	s = session(t, connector.APIChat, `{"messages":[],"cache_hit_threshold":1}`)
	assert.Equal(t, `{"messages":[],"cache_hit_threshold":0.8}`, decode(t, c, s, nil), "in place of the client's")
	c = open(t, ``)
	assert.Contains(t, prefill(t, c, s), `"cache_hit_threshold":0`, "the client's own would make P refuse")
	assert.Contains(t, decode(t, c, s, response), `"cache_hit_threshold":1`, "and is its own wish of D")
}

func TestColdResponses(t *testing.T) {
	c, ok := connector.As[connector.ColdDetector](open(t, `{"cacheHitThreshold":1}`))
	require.True(t, ok)
	for head, want := range map[string]bool{
		`{"choices":[{"index":0,"text":"","finish_reason":"cache_threshold"}],"usage":{}}`:              true,
		`{"choices":[{"index":0,"message":{"content":""},"finish_reason": "cache_threshold"}]}`:         true,
		`{"choices":[{"index":0,"delta":{},"finish_reason":"cache_threshold"}]}`:                        true,
		`{"choices":[{"index":0,"text":"cache_threshold","finish_reason":"length"}]}`:                   false,
		`{"choices":[{"index":0,"text":"\"finish_reason\":\"cache_threshold\"","finish_reason":null}]}`: false,
		`{"choices":[]}`: false, `cache_threshold`: false, ``: false,
	} {
		assert.Equal(t, want, c.Cold(nil, 200, []byte(head)), head)
		assert.False(t, c.Cold(nil, 500, []byte(head)))
	}
}

// A prompt of one token ends any engine with this connector (docs/protocols/sharedstorage.md, recording 11).
func TestPromptsOfOneTokenAreRefused(t *testing.T) {
	type k struct {
		api  connector.API
		body string
	}
	checker := func(c connector.KVConnector) connector.RequestChecker {
		rc, ok := connector.As[connector.RequestChecker](c)
		require.True(t, ok)
		return rc
	}(open(t, ``))
	for _, x := range []k{
		{connector.APICompletions, `{"prompt":[5]}`},
		{connector.APICompletions, `{"prompt": [ 5 ] }`},
		{connector.APICompletions, `{"prompt":[[5]]}`},
		{connector.APICompletions, `{"prompt":[[1,2,3],[5],[6,7]],"n":2,"prompt_logprobs":1}`},
		{connector.APICompletions, `{"prompt":[[1,2,3],[ 5]]}`},
		{connector.APIGenerate, `{"token_ids":[5],"sampling_params":{}}`},
		{connector.APICompletions, `{"prompt":"long","truncate_prompt_tokens":1}`},
		{connector.APIChat, `{"messages":[],"truncate_prompt_tokens":1.0}`},
		{connector.APIChat, `{"messages":[],"truncate_prompt_tokens":-1}`},
		{connector.APIChat, `{"messages":[],"truncate_prompt_tokens":"1"}`},
		{connector.APIChat, `{"messages":[],"truncate_prompt_tokens":true}`},
		{connector.APIResponses, `{"input":"x","truncation":"auto"}`},
		{connector.APIResponses, `{"input":"x","truncation":null}`},
	} {
		s := session(t, x.api, x.body)
		err := checker.CheckRequest(s.Request)
		var refused *connector.RequestError
		require.ErrorAs(t, err, &refused, x.body)
		assert.NotEmpty(t, refused.Param)
		require.Error(t, open(t, ``).Prefill(context.Background(), s, contract.NewLeg(s.Request)),
			"who describes legs without a flow is told, too")
	}
	for _, x := range []k{
		{connector.APICompletions, `{"prompt":[5,6]}`},
		{connector.APICompletions, `{"prompt":[5,6,7,8]}`},
		{connector.APICompletions, `{"prompt":[[5,6],[7,8,9]]}`},
		{connector.APICompletions, `{"prompt":"Q"}`}, // a text: only the engine's tokenizer knows
		{connector.APICompletions, `{"prompt":["Q"]}`},
		{connector.APICompletions, `{"prompt":["a","[5]","\"[5]"]}`},
		{connector.APICompletions, `{"prompt":[]}`}, // the engine refuses it
		{connector.APICompletions, `{"prompt":"x","truncate_prompt_tokens":2}`},
		{connector.APICompletions, `{"prompt":"x","truncate_prompt_tokens":null}`},
		{connector.APIGenerate, `{"token_ids":[5,6]}`},
		{connector.APIResponses, `{"input":[5],"truncation":"disabled"}`},
		{connector.APIChat, `{"messages":[5]}`},
	} {
		assert.NoError(t, checker.CheckRequest(session(t, x.api, x.body).Request), x.body)
	}
}

func FuzzPromptOfOneToken(f *testing.F) {
	for _, p := range []string{`[1]`, `[[1],[2,3]]`, `["a",1]`, `[[],[1]]`, `[ 12 , 3]`, `"x"`} {
		f.Add(p)
	}
	c := open(f, ``).(*sharedstorage.Connector)
	f.Fuzz(func(t *testing.T, prompt string) {
		r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":`+prompt+`}`))
		if err != nil {
			return
		}
		var one []int
		var many [][]int
		want := json.Unmarshal([]byte(prompt), &one) == nil && len(one) == 1
		if json.Unmarshal([]byte(prompt), &many) == nil {
			for _, p := range many {
				want = want || len(p) == 1
			}
		}
		if want {
			require.Error(t, c.CheckRequest(r), prompt)
		}
	})
}

func TestUnsupported(t *testing.T) {
	plain, first := open(t, ``), open(t, `{"cacheHitThreshold":0.5}`)
	for _, k := range []struct {
		api                connector.API
		body, plain, first string
	}{
		{connector.APIChat, `{"n":2}`, "", ""},
		{connector.APIChat, `{"prompt_logprobs":1}`, "prompt_logprobs", "prompt_logprobs"},
		{connector.APICompletions, `{"prompt":["a","b"]}`, "prompt", "prompt"},
		{connector.APIGenerate, `{"token_ids":[1,2]}`, "", "cache_hit_threshold"},
		{connector.APIResponses, `{"input":"x"}`, "", "cache_hit_threshold"},
		{connector.APIMessages, `{"messages":[]}`, "", "cache_hit_threshold"},
		{connector.APISGLang, `{"text":"x"}`, "text", "cache_hit_threshold"},
	} {
		for c, want := range map[connector.KVConnector]string{plain: k.plain, first: k.first} {
			assert.Equal(t, want, uncarried.Member(c, session(t, k.api, k.body).Request), k.body)
		}
	}
}

func TestSettings(t *testing.T) {
	for _, name := range []string{"sharedstorage", "ExampleConnector", "SharedStorageConnector"} {
		c, err := connector.Open(
			config.Spec{Type: name, Config: json.RawMessage(`{"shared_storage_path":"local_storage"}`)},
		)
		require.NoError(t, err)
		assert.IsType(t, &sharedstorage.Connector{}, c)
	}
	for settings, want := range map[string]string{
		`{"cacheHitThreshold":1.5}`:                           "cacheHitThreshold",
		`{"cacheHitThreshold":-0.1}`:                          "cacheHitThreshold",
		`{"cacheHitThreshold":"0.5"}`:                         "cacheHitThreshold",
		`{"cacheHitTreshold":0.5}`:                            "did you mean cacheHitThreshold",
		`{"sharedStoragePath":"a","shared_storage_path":"b"}`: "shared_storage_path",
	} {
		_, err := connector.Open(config.Spec{Type: "sharedstorage", Config: json.RawMessage(settings)})
		require.ErrorContains(t, err, want)
		require.NotEmpty(t, config.FieldErrors(err)[0].Path)
	}
}
