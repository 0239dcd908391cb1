// SPDX-License-Identifier: Apache-2.0

package sharedstorage_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/sharedstorage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var harness = connectortest.Harness{
	Name:   sharedstorage.Name,
	Config: json.RawMessage(`{"cacheHitThreshold":0.8,"sharedStoragePath":"/kv"}`),
}

// prefillFirst tests the connector without a threshold, which supports all of vLLM's APIs.
var prefillFirst = connectortest.Harness{
	Name:   sharedstorage.Name,
	Config: json.RawMessage(`{"shared_storage_path":"/kv"}`),
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestConformanceWithoutAThreshold(t *testing.T) { connectortest.Run(t, prefillFirst) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(sharedstorage.Name), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }

func TestAClientsOwnThreshold(t *testing.T) {
	c, response := play.Open(t, sharedstorage.Name, `{"cacheHitThreshold":0.8}`), play.Response(`{}`)
	s := play.Session(t, connector.APIChat, `{"messages":[],"cache_hit_threshold":1}`)
	assert.Equal(t, `{"messages":[],"cache_hit_threshold":0.8}`, play.Decode(t, c, s, nil).Body,
		"in place of the client's")
	c = play.Open(t, sharedstorage.Name, ``)
	assert.Contains(t, play.Prefill(t, c, s).Body, `"cache_hit_threshold":0`, "the client's own would make P refuse")
	assert.Contains(t, play.Decode(t, c, s, response).Body, `"cache_hit_threshold":1`, "and is its own wish of D")
}

func TestColdResponses(t *testing.T) {
	c, ok := connector.As[connector.ColdDetector](play.Open(t, sharedstorage.Name, `{"cacheHitThreshold":1}`))
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
	c := play.Open(t, sharedstorage.Name, ``).(*sharedstorage.Connector)
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
		s := play.Session(t, x.api, x.body)
		var refused *connector.RequestError
		require.ErrorAs(t, c.CheckRequest(s.Request), &refused, x.body)
		assert.NotEmpty(t, refused.Param)
		_, err := play.TryPrefill(c, s)
		require.Error(t, err, "who describes legs without a flow is told, too")
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
		assert.NoError(t, c.CheckRequest(play.Request(t, x.api, x.body)), x.body)
	}
}

func FuzzPromptOfOneToken(f *testing.F) {
	for _, p := range []string{`[1]`, `[[1],[2,3]]`, `["a",1]`, `[[],[1]]`, `[ 12 , 3]`, `"x"`} {
		f.Add(p)
	}
	c := play.Open(f, sharedstorage.Name, ``).(*sharedstorage.Connector)
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

func TestSettings(t *testing.T) {
	for _, name := range []string{"sharedstorage", "ExampleConnector", "SharedStorageConnector"} {
		play.Open(t, name, `{"shared_storage_path":"local_storage"}`)
	}
	play.Refuses(t, sharedstorage.Name, map[string]string{
		`{"cacheHitThreshold":2}`:                             "cacheHitThreshold",
		`{"cacheHitThreshold":1.5}`:                           "cacheHitThreshold",
		`{"cacheHitThreshold":-0.1}`:                          "cacheHitThreshold",
		`{"cacheHitThreshold":"0.5"}`:                         "cacheHitThreshold",
		`{"cacheHitTreshold":0.5}`:                            "cacheHitTreshold … did you mean cacheHitThreshold",
		`{"sharedStoragePath":"a","shared_storage_path":"b"}`: "shared_storage_path",
	})
}
