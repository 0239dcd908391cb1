// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/lmcachepd"
	"github.com/pdkit/pdkit/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// receiverOfTwo is a decode engine with two tensor-parallel ranks.
var receiverOfTwo = map[string]string{"receiverHost": "10.0.0.7", "receiverInitPorts": "8300,8301",
	"receiverAllocPorts": "8400,8401"}

func harness() connectortest.Harness {
	return connectortest.Harness{
		Name:   lmcachepd.Name,
		Config: json.RawMessage(`{"notifyListen":"127.0.0.1:0","notifyTimeout":"7s","notifications":3}`),
		Decode: discovery.Endpoint{Attributes: receiverOfTwo},
		Event: func(s *connector.Session) connector.Event {
			return connector.Event{Body: []byte("\x82\xa4type\xaaProxyNotif\xa6req_id\xd9\x20" + s.ID)}
		},
		// Only P gets an id: D finds the KV by the prompt's tokens.
		Except: connectortest.Exceptions{NotByID: true},
	}
}

// withFirstToken is the harness with the first token from P, which only chat and completions support.
func withFirstToken() connectortest.Harness {
	h := harness()
	h.Config = json.RawMessage(`{"notifyListen":"127.0.0.1:0","notifyTimeout":"7s","notifications":3,` +
		`"retFirstTok":true}`)
	const chat = `"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","prompt_token_ids":[259,1,2],` +
		`"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1},"kv_transfer_params":{"first_tok":72}`
	const completion = `"id":"cmpl-1","object":"text_completion","created":1,"model":"m","usage":{"prompt_tokens":3,` +
		`"total_tokens":4,"completion_tokens":1},"kv_transfer_params":{"first_tok":72}`
	h.Response = func(s *connector.Session, _ []byte) connectortest.Response {
		body := `{` + completion + `,"choices":[{"index":0,"text":"He","finish_reason":"length","stop_reason":null,` +
			`"token_ids":[72],"prompt_token_ids":[1,2,3]}]}`
		if s.API == connector.APIChat {
			body = `{` + chat + `,"choices":[{"index":0,"message":{"role":"assistant","content":"He"},` +
				`"finish_reason":"length","stop_reason":null,"token_ids":[72]}]}`
		}
		return connectortest.Response{Body: []byte(body)}
	}
	for _, body := range []string{`{` + chat + `}`, `{` + completion + `,"choices":null}`, `{` + chat +
		`,"choices":[]}`} {
		h.BadResponses = append(h.BadResponses, connectortest.Response{Body: []byte(body)})
	}
	h.Except.Refuses = []string{"logprobs", "stop", "tools", "response_format"}
	h.Needs = []string{"first_tok"}
	// D continues after P's token.
	h.Except.Rewrites = []string{"return_token_ids", "prompt", "max_tokens", "max_completion_tokens", "min_tokens",
		"truncate_prompt_tokens"}
	return h
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness()) }

func TestConformanceWithTheFirstTokenFromP(t *testing.T) { connectortest.Run(t, withFirstToken()) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(lmcachepd.Name), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness()) }

func FuzzFirstToken(f *testing.F) { connectortest.Fuzz(f, withFirstToken()) }

func open(t testing.TB, o *lmcachepd.Options) *lmcachepd.Connector {
	return play.New(t, lmcachepd.New, o)
}

// firstToken is the connector with the first token from P.
func firstToken(t testing.TB) *lmcachepd.Connector {
	return open(t, &lmcachepd.Options{RetFirstToken: true})
}

func decodeEngine(t testing.TB, attributes map[string]string) discovery.Endpoint {
	return play.Engine(t, "http://10.0.0.6:8200", discovery.RoleDecode, attributes)
}

// session has a decode engine with attributes, which may be left out.
func session(t testing.TB, api connector.API, body string, attributes ...map[string]string) *connector.Session {
	return play.Session(t, api, body, append([]map[string]string{nil}, attributes...)...)
}

// The receiver's host is the engine's own, or an attribute's. Its ports may be in the engines' settings.
func TestWhereTheReceiverIs(t *testing.T) {
	spec := func(o *lmcachepd.Options, attributes map[string]string) (string, error) {
		s := session(t, connector.APICompletions, `{"prompt":"x"}`, attributes)
		leg, err := play.TryPrefill(open(t, o), s)
		return strings.ReplaceAll(leg.Body, s.ID, "ID"), err
	}
	got, err := spec(nil, map[string]string{"receiverInitPorts": "8300", "receiverAllocPorts": "8400"})
	require.NoError(t, err)
	assert.Equal(t, `{"prompt":"x","max_tokens":1,"stream":false,"kv_transfer_params":{"disagg_spec":{"req_id":"ID",`+
		`"receiver_host":"10.0.0.6","receiver_init_port":[8300],"receiver_alloc_port":[8400]}}}`, got)
	got, err = spec(
		nil, map[string]string{"receiverHost": "2001:db8::7", "receiverInitPorts": " 1, 2 ",
			"receiverAllocPorts": "3,4"},
	)
	require.NoError(t, err)
	assert.Contains(t, got, `"receiver_host":"2001:db8::7","receiver_init_port":[1,2],"receiver_alloc_port":[3,4]`)
	got, err = spec(
		&lmcachepd.Options{
			Engine: map[string]json.RawMessage{"nixl_peer_port": []byte(`55555`),
				"lmcache.pd_peer_alloc_port": []byte(`"55556"`)},
		}, nil,
	)
	require.NoError(t, err)
	assert.Contains(t, got, `"receiver_init_port":[55555],"receiver_alloc_port":[55556]`)

	for rule, attributes := range map[string]map[string]string{
		"no ports":                 nil,
		"no alloc ports":           {"receiverInitPorts": "8300"},
		"not a port":               {"receiverInitPorts": "0", "receiverAllocPorts": "1"},
		"not numbers":              {"receiverInitPorts": "a", "receiverAllocPorts": "1"},
		"more of one than another": {"receiverInitPorts": "1,2", "receiverAllocPorts": "1"},
		"a URL for a host": {"receiverHost": "http://user:pw@evil/", "receiverInitPorts": "1",
			"receiverAllocPorts": "2"},
		"a host of two lines": {"receiverHost": "a\r\nb", "receiverInitPorts": "1", "receiverAllocPorts": "2"},
	} {
		_, err := spec(nil, attributes)
		var bad *attr.Error
		require.ErrorAs(t, err, &bad, rule)
		c := open(t, nil)
		faults := config.FieldErrors(c.CheckEndpoint(decodeEngine(t, attributes)))
		require.Len(t, faults, 1, rule)
		assert.Equal(t, "attributes."+bad.Attribute, faults[0].Path)
		prefill := decodeEngine(t, attributes)
		prefill.Role = discovery.RolePrefill
		assert.NoError(t, c.CheckEndpoint(prefill), "only engines that decode receive")
	}
}

func TestWhatTheFirstTokenFromPCannotServe(t *testing.T) {
	for _, k := range []struct {
		api          connector.API
		body, member string
	}{
		{connector.APIChat, `{"messages":[]}`, ""},
		{connector.APIChat, `{"tools":[{"type":"function"}]}`, "tools"},
		{connector.APIChat, `{"tools":[],"tool_choice":"none","response_format":{"type":"text"},` +
			`"presence_penalty":0.0,"logprobs":false,"stop":null,"echo":""}`, ""},
		{connector.APIChat, `{"response_format":{"type":"json_object"}}`, "response_format"},
		{connector.APIChat, `{"structured_outputs":{"regex":"a"}}`, "structured_outputs"},
		{connector.APIChat, `{"logprobs":true}`, "logprobs"},
		{connector.APICompletions, `{"prompt":"a","logprobs":3}`, "logprobs"},
		{connector.APICompletions, `{"prompt":"a","stop":["b"]}`, "stop"},
		{connector.APICompletions, `{"prompt":"a","stop":[]}`, ""},
		{connector.APICompletions, `{"prompt":"a","frequency_penalty":0.1}`, "frequency_penalty"},
		{connector.APICompletions, `{"prompt":"a","return_token_ids":true}`, "return_token_ids"},
		{connector.APICompletions, `{"prompt":"a","echo":true}`, "echo"},
		{connector.APIChat, `{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}]}`, ""},
		{connector.APIChat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}`,
			"messages"},
	} {
		r := play.Request(t, k.api, k.body)
		assert.Empty(t, play.Uncarried(open(t, nil), r), "without it: %s", k.body)
		assert.Equal(t, k.member, play.Uncarried(firstToken(t), r), k.body)
	}
}

// answerOf is P's response to a completion, with some members replaced.
func answerOf(t testing.TB, chat bool, replace map[string]string) *connector.PrefillResult {
	t.Helper()
	h := withFirstToken()
	s := &connector.Session{API: connector.APICompletions}
	if chat {
		s.API = connector.APIChat
	}
	body := h.Response(s, nil).Body
	for old, now := range replace {
		require.Contains(t, string(body), old)
		body = []byte(strings.Replace(string(body), old, now, 1))
	}
	return play.Response(string(body))
}

func TestDecodeGoesOnFromTheFirstToken(t *testing.T) {
	c := firstToken(t)
	decode := func(api connector.API, body string) string {
		s := session(t, api, body, receiverOfTwo)
		return play.Decode(t, c, s, answerOf(t, api == connector.APIChat, nil)).Body
	}
	for client, want := range map[string]string{
		`{"prompt":"abc","max_tokens":9}`: `{"prompt":[1,2,3,72],"max_tokens":8}`,
		`{"prompt":"abc","max_tokens":9.0,"min_tokens":3}`: `{"prompt":[1,2,3,72],"max_tokens":8,` +
			`"min_tokens":2}`,
		`{"prompt":"abc","min_tokens":0}`: `{"prompt":[1,2,3,72],"min_tokens":0,` +
			`"max_tokens":15}`,
		`{"prompt":"abc","max_tokens":null}`:                           `{"prompt":[1,2,3,72],"max_tokens":null}`,
		`{"prompt":"abc","max_tokens":2,"truncate_prompt_tokens":3}`:   `{"prompt":[1,2,3,72],"max_tokens":1}`,
		`{"prompt":"abc","max_tokens":0}`:                              `{"prompt":[1,2,3,72],"max_tokens":0}`,
		`{"prompt":"abc","max_tokens":5,"kv_transfer_params":{"a":1}}`: `{"prompt":[1,2,3,72],"max_tokens":4}`,
	} {
		assert.Equal(t, want, decode(connector.APICompletions, client), client)
	}
	for client, want := range map[string]string{
		`{"messages":[]}`: `{"messages":[],"kv_transfer_params":{"prompt_token_ids":[259,1,2,72]}}`,
		`{"messages":[],"max_tokens":1,"max_completion_tokens":9}`: `{"messages":[],"max_tokens":1,` +
			`"max_completion_tokens":8,"kv_transfer_params":{"prompt_token_ids":[259,1,2,72]}}`,
		`{"messages":[],"max_tokens":9}`: `{"messages":[],"max_tokens":8,` +
			`"kv_transfer_params":{"prompt_token_ids":[259,1,2,72]}}`,
	} {
		assert.Equal(t, want, decode(connector.APIChat, client), client)
	}
}

// A client's min_tokens above 1 would be an error beside a limit of one token, but P must not end before the first
// token.
func TestPrefillDoesNotEndBeforeTheFirstTokenThatTheClientWants(t *testing.T) {
	c := firstToken(t)
	s := session(t, connector.APICompletions, `{"prompt":"abc","max_tokens":9,"min_tokens":4}`, receiverOfTwo)
	body := play.Prefill(t, c, s).Body
	assert.Contains(t, body, `"min_tokens":1`)
	assert.Contains(t, body, `"return_token_ids":true`)
	assert.Contains(t, body, `"kv_transfer_params":{"ret_first_tok":true,"disagg_spec":{`)
}

func TestAnswersWithoutAFirstTokenAreRefused(t *testing.T) {
	c := firstToken(t)
	for rule, replace := range map[string]map[string]string{
		"no token":            {`{"first_tok":72}`: `null`},
		"a text":              {`{"first_tok":72}`: `{"first_tok":"72"}`},
		"negative":            {`{"first_tok":72}`: `{"first_tok":-72}`},
		"a fraction":          {`{"first_tok":72}`: `{"first_tok":7.2}`},
		"no prompt":           {`[1,2,3]`: `null`},
		"an empty prompt":     {`[1,2,3]`: `[]`},
		"a prompt of texts":   {`[1,2,3]`: `["1"]`},
		"a nested prompt":     {`[1,2,3]`: `[[1]]`},
		"aborted":             {`"finish_reason":"length"`: `"finish_reason":"abort"`},
		"text that is none":   {`"text":"He"`: `"text":null`},
		"garbage in a member": {`"text":"He"`: `"text":"He","x":[1,,2]`},
	} {
		s := session(t, connector.APICompletions, `{"prompt":"abc"}`, receiverOfTwo)
		_, err := play.TryDecode(c, s, answerOf(t, false, replace))
		require.ErrorIs(t, err, connector.ErrNoTransfer, rule)
		assert.NotContains(t, err.Error(), "72", rule)
		_, final := c.Final(s, answerOf(t, false, replace))
		assert.False(t, final, rule)
	}
}

// LMCache's own proxy asks D for the remaining tokens even if none remain: for 0 tokens, which D refuses.
func TestPsAnswerIsTheClientsWhereNothingIsLeft(t *testing.T) {
	c := firstToken(t)
	stopped := map[string]string{`"finish_reason":"length"`: `"finish_reason":"stop"`}

	a, ok := c.Final(session(t, connector.APICompletions, `{"prompt":"abc","max_tokens":1}`),
		answerOf(t, false, nil))
	require.True(t, ok)
	assert.JSONEq(t, `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,`+
		`"text":"He","finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_token_ids":null}],`+
		`"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1},"kv_transfer_params":null}`, string(a.Body))

	a, ok = c.Final(
		session(t, connector.APIChat, `{"messages":[],"max_tokens":5,"stream":true,`+
			`"stream_options":{"include_usage":true}}`), answerOf(t, true, stopped),
	)
	require.True(t, ok)
	require.Len(t, a.Events, 4)
	assert.JSONEq(t, `{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",`+
		`"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`,
		string(a.Events[0]))
	assert.JSONEq(t, `{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",`+
		`"choices":[{"index":0,"delta":{"content":"He"},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}`,
		string(a.Events[1]))
	assert.JSONEq(t, `{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],`+
		`"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}}`, string(a.Events[2]))
	assert.Equal(t, "[DONE]", string(a.Events[3]))

	a, ok = c.Final(session(t, connector.APICompletions, `{"prompt":"abc","stream":true}`),
		answerOf(t, false, stopped))
	require.True(t, ok)
	require.Len(t, a.Events, 2, "no counts unless they are asked for")

	for _, body := range []string{`{"prompt":"abc","max_tokens":2}`, `{"prompt":"abc"}`} {
		_, ok = c.Final(session(t, connector.APICompletions, body, nil), answerOf(t, false, nil))
		assert.False(t, ok, body)
	}
	_, ok = open(t, nil).Final(session(t, connector.APICompletions, `{"prompt":"abc","max_tokens":1}`),
		answerOf(t, false, stopped))
	assert.False(t, ok, "without the first token from P, D makes it")
}

func TestTheFirstTokenStandsBeforeDsAnswer(t *testing.T) {
	rewrite := func(api connector.API, p *connector.PrefillResult) func([]byte) ([]byte, error) {
		c := firstToken(t)
		return c.Rewrite(session(t, api, `{"messages":[],"prompt":"x"}`),
			func() *connector.PrefillResult { return p })
	}
	run := func(fn func([]byte) ([]byte, error), events ...string) []string {
		var out []string
		for _, e := range events {
			data, err := fn([]byte(e))
			require.NoError(t, err)
			out = append(out, string(data))
		}
		return out
	}
	assert.Equal(t, []string{
		`{"id":"d","choices":[{"index":0,"text":"Hel","finish_reason":null}]}`,
		`{"id":"d","choices":[{"index":0,"text":"lo","finish_reason":"stop"}],"usage":null}`,
		`{"id":"d","choices":[],"usage":{"prompt_tokens":3,"total_tokens":6,"completion_tokens":3}}`,
	}, run(rewrite(connector.APICompletions, answerOf(t, false, nil)),
		`{"id":"d","choices":[{"index":0,"text":"l","finish_reason":null}]}`,
		`{"id":"d","choices":[{"index":0,"text":"lo","finish_reason":"stop"}],"usage":null}`,
		`{"id":"d","choices":[],"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2}}`),
		"a stream: once, and the sum of the counts stays")
	assert.Equal(t, []string{
		`{"choices":[{"delta":{"role":"assistant","content":"He"}}],"usage":{"prompt_tokens":3,"completion_tokens":1}}`,
		`{"choices":[{"delta":{"content":"l"}}],"usage":{"prompt_tokens":3,"completion_tokens":2}}`,
	}, run(rewrite(connector.APIChat, answerOf(t, true, nil)),
		`{"choices":[{"delta":{"role":"assistant","content":""}}],"usage":{"prompt_tokens":4,"completion_tokens":0}}`,
		`{"choices":[{"delta":{"content":"l"}}],"usage":{"prompt_tokens":4,"completion_tokens":1}}`),
		"with the role, and counts in each event")
	assert.Equal(
		t, []string{`{"choices":[{"message":{"content":"Hello","reasoning":null}}],"usage":{"prompt_tokens":3,` +
			`"completion_tokens":5}}`},
		run(rewrite(connector.APIChat, answerOf(t, true, nil)), `{"choices":[{"message":{"content":"llo",`+
			`"reasoning":null}}],"usage":{"prompt_tokens":4,"completion_tokens":4}}`), "a whole response")
	assert.Equal(t, []string{`{"choices":[{"message":{"content":"He","reasoning":null}}]}`},
		run(rewrite(connector.APIChat, answerOf(t, true, nil)), `{"choices":[{"message":{"content":null,`+
			`"reasoning":null}}]}`), "D had nothing to add")
	assert.Equal(
		t, []string{`{"choices":[{"delta":{"role":"assistant","content":"","reasoning":"He"}}]}`,
			`{"choices":[{"delta":{"content":"x"}}]}`},
		run(
			rewrite(
				connector.APIChat,
				answerOf(t, true, map[string]string{`"content":"He"`: `"content":null,"reasoning":"He"`}),
			),
			`{"choices":[{"delta":{"role":"assistant","content":""}}]}`, `{"choices":[{"delta":{"content":"x"}}]}`),
		"P was thinking")
	assert.Equal(t, []string{`{"error":{"message":"m"}}`, `not JSON`},
		run(rewrite(connector.APIChat, answerOf(t, true, nil)), `{"error":{"message":"m"}}`, `not JSON`))

	_, err := rewrite(connector.APIChat, nil)([]byte(`{}`))
	assert.ErrorIs(t, err, connector.ErrNoTransfer)
	assert.Nil(
		t, open(t, nil).Rewrite(session(t, connector.APIChat, `{}`),
			func() *connector.PrefillResult { return nil }), "the stream stays unparsed without need",
	)
}

// If P's response is the last one but malformed in a part that is not read, it must not go to the client, and D must
// not continue after it.
func TestAMalformedLastAnswerIsNotGoneOnFrom(t *testing.T) {
	c := firstToken(t)
	for rule, k := range map[string]struct {
		limit   string
		replace map[string]string
	}{
		"P ended":            {"9", map[string]string{`"length"`: `"stop"`, `"usage":{`: `"usage":{,`}},
		"one token is asked": {"1", map[string]string{`"usage":{`: `"usage":{,`}},
	} {
		s := session(t, connector.APIChat, `{"messages":[],"max_tokens":`+k.limit+`}`, receiverOfTwo)
		p := answerOf(t, true, k.replace)
		_, final := c.Final(s, p)
		assert.False(t, final, rule)
		_, err := play.TryDecode(c, s, p)
		require.ErrorIs(t, err, connector.ErrNoTransfer, rule)
	}
}
