// SPDX-License-Identifier: Apache-2.0

package sglang_test

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/sglang"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var harness = connectortest.Harness{
	Name:    sglang.Name,
	Config:  json.RawMessage(`{"bootstrapPort":9000,"prefillCap":true,"transferBackend":"nixl"}`),
	Prefill: discovery.Endpoint{Attributes: map[string]string{"bootstrapPort": "9001", "dpSize": "4"}},
	Except: connectortest.Exceptions{
		KeepsLimit:    true, // /v1/responses: SGLang takes two tokens off it, so P gets three
		KeepsLogprobs: true, // P samples the first token, and gives D its log probability only if it was asked for
	},
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(sglang.Name), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }

func open(t testing.TB, settings string) connector.KVConnector {
	return play.Open(t, sglang.Name, settings)
}

// session is a session with a known random number: its room is 5.
func session(t testing.TB, api connector.API, body string, attributes ...map[string]string) *connector.Session {
	t.Helper()
	s := play.Known(t, [16]byte{10}, api, body, attributes...)
	r, err := contract.Without(s.Request, open(t, ``).Traits().Members) // as the flow does it
	require.NoError(t, err)
	s.Request = r
	return s
}

const rendezvous = `"bootstrap_host":"10.0.0.5","bootstrap_port":8998,"bootstrap_room":5`

// P samples the first token, and gives D its log probability only if P's own request asks for log probabilities.
func TestPrefillKeepsWhatShapesTheFirstToken(t *testing.T) {
	c := open(t, ``)
	for body, kept := range map[string]string{
		`{"messages":[],"logprobs":true,"top_logprobs":3,"temperature":0.5}`: `"logprobs":true,"top_logprobs":3,` +
			`"temperature":0.5`,
		`{"messages":[],"stop":["a"],"stop_token_ids":[7]}`: `"stop":["a"],"stop_token_ids":[7]`,
		`{"messages":[],"min_tokens":8}`:                    `"min_tokens":1`,
	} {
		assert.Contains(t, play.Prefill(t, c, session(t, connector.APIChat, body)).Body, kept)
	}
	s := session(t, connector.APISGLang, `{"text":"x","return_logprob":true,"logprob_start_len":0,`+
		`"sampling_params":{"min_new_tokens":3}}`)
	leg := play.Prefill(t, c, s).Body
	assert.Contains(t, leg, `"return_logprob":true,"logprob_start_len":0`)
	assert.Contains(t, leg, `"sampling_params":{"max_new_tokens":1,"min_new_tokens":1}`)
	for _, zero := range []string{`0`, `0.0`, `-1`, `null`} {
		assert.NotContains(t, play.Prefill(t, c, session(t, connector.APIChat, `{"messages":[],"min_tokens":`+zero+
			`}`)).Body, `"min_tokens":1`, zero)
	}
}

func TestWithoutTheCapOnlyTheStreamChanges(t *testing.T) {
	s := session(t, connector.APIChat, `{"messages":[],"stream":true,"max_tokens":9,"min_tokens":2}`)
	assert.Equal(t, `{"messages":[],"stream":false,"max_tokens":9,"min_tokens":2,`+rendezvous+`}`,
		play.Prefill(t, open(t, `{"prefillCap":false}`), s).Body)
}

func TestBootstrapAddressOfTheEngine(t *testing.T) {
	for rule, k := range map[string]struct {
		settings, url string
		attributes    map[string]string
		host          string
		port          int64
	}{
		"defaults":             {``, "http://p.example:1", nil, "p.example", 8998},
		"the connector's port": {`{"bootstrapPort":9000}`, "http://p.example:1", nil, "p.example", 9000},
		"the engine's own port": {`{"bootstrapPort":9000}`, "http://p.example:1",
			map[string]string{"bootstrapPort": "9001"}, "p.example", 9001},
		"the engine's own host": {``, "http://p.example:1", map[string]string{"bootstrapHost": "10.0.0.5"}, "10.0.0.5",
			8998},
		"IPv6 has brackets": {``, "http://[fd00::1]:1", nil, "[fd00::1]", 8998},
		"IPv6 as an attribute": {``, "http://p.example:1", map[string]string{"bootstrapHost": "fd00::2"}, "[fd00::2]",
			8998},
	} {
		s := session(t, connector.APICompletions, `{"prompt":"x"}`)
		s.Prefill = play.Engine(t, k.url, discovery.RolePrefill, k.attributes)
		leg := gjson.Parse(play.Decode(t, open(t, k.settings), s, nil).Body)
		assert.Equal(t, k.host, leg.Get("bootstrap_host").Str, rule)
		assert.Equal(t, k.port, leg.Get("bootstrap_port").Int(), rule)
	}
	s := session(t, connector.APICompletions, `{"prompt":"x"}`, map[string]string{"bootstrapPort": "0"})
	var bad *attr.Error
	_, err := play.TryDecode(open(t, ``), s, nil)
	require.ErrorAs(t, err, &bad)
	assert.Equal(t, "bootstrapPort", bad.Attribute)
}

// A list with one prompt is a list.
func TestEachPromptHasARoomOfItsOwn(t *testing.T) {
	c := open(t, ``)
	for _, k := range []struct {
		api  connector.API
		body string
		n    int // 0 means no list
	}{
		{connector.APICompletions, `{"prompt":"a"}`, 0},
		{connector.APICompletions, `{"prompt":[1,2,3]}`, 0},
		{connector.APICompletions, `{"prompt":[]}`, 0},
		{connector.APICompletions, `{"prompt":["a"]}`, 1},
		{connector.APICompletions, `{"prompt":["a","b","c"]}`, 3},
		{connector.APICompletions, `{"prompt":[[1,2],[3]],"n":1}`, 2},
		{connector.APIChat, `{"messages":[{"a":1},{"b":2}]}`, 0},
		{connector.APIChat, `{"messages":[],"n":1}`, 0},
		{connector.APIResponses, `{"input":[{"role":"user","content":"a"},{"role":"user","content":"b"}]}`, 0},
		{connector.APIMessages, `{"messages":[{"a":1},{"b":2}]}`, 0},
		{connector.APISGLang, `{"text":["a","b"]}`, 2},
		{connector.APISGLang, `{"input_ids":[1,2,3]}`, 0},
		{connector.APISGLang, `{"input_ids":[ [1], [2] ],"sampling_params":{"n":1}}`, 2},
		{connector.APISGLang, `{"input_embeds":[[0.1],[0.2]]}`, 0},
		{connector.APISGLang, `{"input_embeds":[[[0.1]],[[0.2]],[[0.3]]]}`, 3},
	} {
		s := session(t, k.api, k.body)
		require.Empty(t, play.Uncarried(c, s.Request), k.body)
		prefill, decode := gjson.Parse(play.Prefill(t, c, s).Body), gjson.Parse(play.Decode(t, c, s, nil).Body)
		for _, member := range []string{"bootstrap_host", "bootstrap_port", "bootstrap_room"} {
			assert.Equal(t, prefill.Get(member).Raw, decode.Get(member).Raw, "%s of %s", member, k.body)
			assert.Equal(t, k.n > 0, decode.Get(member).IsArray(), "%s of %s", member, k.body)
			if k.n > 0 {
				assert.Len(t, decode.Get(member).Array(), k.n, "%s of %s", member, k.body)
			}
		}
		distinct := map[string]bool{}
		for _, room := range decode.Get("bootstrap_room").Array() {
			distinct[room.Raw] = true
		}
		assert.Len(t, distinct, max(k.n, 1), k.body)
	}
}

// A room has 63 bits and fits P's rank, and both legs name the rank.
func TestRoomChoosesTheRank(t *testing.T) {
	c := open(t, ``)
	for _, size := range []int{1, 2, 3, 8, 1000, 65535} {
		for _, random := range [][16]byte{
			{}, {0: 255, 1: 255, 2: 255, 3: 255, 4: 255, 5: 255, 6: 255, 7: 255, 8: 255, 9: 255, 10: 255, 11: 255},
			{1: 7, 5: 200, 7: 128, 8: 13, 11: 1},
		} {
			s := play.Known(t, random, connector.APICompletions, `{"prompt":["a","b","c","d","e"]}`,
				map[string]string{"dpSize": strconv.Itoa(size)})
			leg := gjson.Parse(play.Decode(t, c, s, nil).Body)
			rooms := map[uint64]bool{}
			for _, room := range leg.Get("bootstrap_room").Array() {
				n, err := strconv.ParseUint(room.Raw, 10, 64)
				require.NoError(t, err)
				assert.LessOrEqual(t, n, uint64(math.MaxInt64))
				assert.EqualValues(t, s.PrefillRank, n%uint64(size), "size %d", size)
				rooms[n] = true
			}
			assert.Len(t, rooms, 5, "size %d", size)
			assert.Equal(t, size > 1, leg.Get("disagg_prefill_dp_rank").Exists())
			assert.EqualValues(t, s.PrefillRank, leg.Get("disagg_prefill_dp_rank").Int())
			prefill := gjson.Parse(play.Prefill(t, c, s).Body)
			assert.False(t, prefill.Get("disagg_prefill_dp_rank").Exists())
			assert.Equal(t, leg.Get("disagg_prefill_dp_rank").Raw, prefill.Get("routed_dp_rank").Raw)
			assert.False(t, leg.Get("routed_dp_rank").Exists(), "D's own rank is D's to choose")
		}
	}
}

// A client's rid could end others' requests, and its ranks would send the legs to different ranks.
func TestMembersThatWouldPartTheLegsGo(t *testing.T) {
	c := open(t, ``)
	s := session(t, connector.APISGLang, `{"text":"x","rid":"","routed_dp_rank":3,"data_parallel_rank":3,`+
		`"disagg_prefill_dp_rank":1,"bootstrap_pair_key":"k","decode_tp_size":2,"priority":1,"extra_key":"t"}`)
	assert.Equal(t, `{"text":"x","priority":1,"extra_key":"t",`+rendezvous+`}`, play.Decode(t, c, s, nil).Body)
	for _, gone := range []string{"rid", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank",
		"bootstrap_pair_key", "decode_tp_size"} {
		assert.False(t, gjson.Get(play.Prefill(t, c, s).Body, gone).Exists(), gone)
	}
}

// SGLang lists adapters as models, and answers a request for one by that name alone from the base model, with 200.
func TestAnAdapterThatAnEngineListsIsAskedFor(t *testing.T) {
	c := open(t, ``)
	const asks = `"lora_path":"sql"`
	for _, k := range []struct {
		rule string
		api  connector.API
		body string
		p, d string // the adapters that the engines list
		want bool
	}{
		{"a chat", connector.APIChat, `{"model":"sql","messages":[]}`, "law,sql", "law,sql", true},
		{"completions", connector.APICompletions, `{"model":"sql","prompt":"a"}`, "sql", "sql", true},
		{"D has lost it, and says so", connector.APICompletions, `{"model":"sql","prompt":"a"}`, "sql", "law", true},
		{"the base model", connector.APIChat, `{"model":"m","messages":[]}`, "sql", "sql", false},
		{"as SGLang reads it", connector.APIChat, `{"model":"m:sql","messages":[]}`, "sql", "sql", false},
		{"nothing is listed", connector.APIChat, `{"model":"sql","messages":[]}`, "", "", false},
		{"the client asks itself", connector.APIChat, `{"model":"sql","messages":[],"lora_path":"law"}`, "sql", "sql",
			false},
		{"an API that has no such member", connector.APIResponses, `{"model":"sql","input":"a"}`, "sql", "sql", false},
	} {
		s := session(t, k.api, k.body, map[string]string{"adapters": k.p}, map[string]string{"adapters": k.d})
		assert.Equal(t, k.want, strings.Contains(play.Prefill(t, c, s).Body, asks), k.rule)
		assert.Equal(t, k.want, strings.Contains(play.Decode(t, c, s, nil).Body, asks), k.rule)
	}
}

func TestUnsupported(t *testing.T) {
	c := open(t, ``)
	for _, k := range []struct {
		api          connector.API
		body, member string
	}{
		{connector.APISGLang, `{"text":"a","return_logprob":true,"logprob_start_len":0}`, ""},
		{connector.APISGLang, `{"text":"a","return_hidden_states":true}`, "return_hidden_states"},
		{connector.APISGLang, `{"text":"a","return_routed_experts":true}`, "return_routed_experts"},
		{connector.APISGLang, `{"text":"a","return_indexer_topk":true}`, "return_indexer_topk"},
		{connector.APIChat, `{"messages":[],"return_routed_experts":true}`, "return_routed_experts"},
		{connector.APIChat, `{"messages":[],"return_indexer_topk":false,"return_meta_info":true,` +
			`"logprob_start_len":-1}`, ""},
		{connector.APIChat, `{"messages":[],"logprobs":true,"logprob_start_len":0}`, ""},
		{connector.APIChat, `{"messages":[],"logprobs":true,"logprob_start_len":0,"return_meta_info":true}`,
			"logprob_start_len"},
		{connector.APISGLang, `{"text":"a","return_logprob":true,"logprob_start_len":0,` +
			`"return_flat_raw_top_logprobs":true}`, "return_flat_raw_top_logprobs"},
		{connector.APISGLang, `{"text":"a","return_logprob":true,"return_flat_raw_top_logprobs":true}`, ""},
		{connector.APICompletions, `{"prompt":"a","echo":true,"logprobs":1}`, "echo"},
		{connector.APISGLang, `{"text":"a","session_params":{"id":"s"}}`, "session_params"},
		{connector.APIChat, `{"messages":[],"n":999999999999}`, "n"},
		{connector.APIChat, `{"messages":[],"n":1e15}`, "n"},
		{connector.APICompletions, `{"prompt":[` + strings.Repeat(`"a",`, 4096) + `"a"]}`, "prompt"},
		{connector.APIResponses, `{"input":"a","store":true,"truncation":"auto"}`, ""},
	} {
		assert.Equal(t, k.member, play.Uncarried(c, session(t, k.api, k.body).Request), k.body[:min(len(k.body), 80)])
	}
}

func TestSettings(t *testing.T) {
	play.Refuses(t, "SGLang", map[string]string{
		`{"bootstrapPort":-1}`: "bootstrapPort", `{"bootstrapPort":70000}`: "bootstrapPort",
		`{"bootstrapPort":65536}`: "bootstrapPort", `{"bootstrapPort":"1"}`: "bootstrapPort",
		`{"transferBackend":"fake"}`: "transferBackend", `{"transferBackend":1}`: "transferBackend",
		`{"transferTimeout":"0s"}`: "transferTimeout", `{"transferTimeout":"-1s"}`: "transferTimeout",
		`{"prefillCap":1}`: "prefillCap", `{"prefillCap":"no"}`: "prefillCap", `{"bootstrapport":1}`: "bootstrapport",
	})
}

// Entries from discovery are not checked before. Rooms for another number of ranks would send D to a rank on which
// nobody computes.
func TestAnEngineWhoseEntryIsMalformedGetsNoLeg(t *testing.T) {
	c := open(t, ``)
	for attribute, value := range map[string]string{"dpSize": "four", "bootstrapHost": "http://p",
		"bootstrapPort": "0"} {
		s := session(t, connector.APICompletions, `{"prompt":"x"}`, map[string]string{attribute: value})
		var bad *attr.Error
		_, onPrefill := play.TryPrefill(c, s)
		_, onDecode := play.TryDecode(c, s, nil)
		for _, err := range []error{onPrefill, onDecode} {
			require.ErrorAs(t, err, &bad, attribute)
			assert.Equal(t, attribute, bad.Attribute)
		}
	}
}
