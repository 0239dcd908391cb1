// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/trtllm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, settings string) connector.KVConnector {
	return play.Open(t, trtllm.Name, settings)
}

// session is a session with a known random number: its id is 2^62 if there is no machine number.
func session(t testing.TB, api connector.API, body string) *connector.Session {
	t.Helper()
	return play.Known(t, [16]byte{}, api, body)
}

// after describes decode after P's response.
func after(c connector.KVConnector, s *connector.Session, response string) (play.Leg, error) {
	return play.TryDecode(c, s, play.Response(response))
}

const id = "4611686018427387904"

const response = `{"prompt_token_ids":[1,15043],"usage":{"prompt_tokens":2},"choices":[{"index":0,` +
	`"finish_reason":"length","disaggregated_params":` +
	`{"request_type":"context_only","first_gen_tokens":[278],"ctx_request_id":9007199254740993,"disagg_request_id":` +
	id + `,"encoded_opaque_state":"b64","draft_tokens":null,"ctx_usage":null,"x_future":1e400}}]}`

const handedOn = `{"request_type":"generation_only","first_gen_tokens":[278],"ctx_request_id":9007199254740993,` +
	`"disagg_request_id":` + id + `,"encoded_opaque_state":"b64","draft_tokens":null,` +
	`"ctx_usage":{"prompt_tokens":2},"x_future":1e400}`

// The golden exchanges have the usual places and members.
func TestWhereParametersStandInPsResponse(t *testing.T) {
	c := open(t, ``)
	top := strings.Replace(response, `"disaggregated_params":{`, `"x":{`, 1)
	top = `{"disaggregated_params":` + gjson.Get(response, "choices.0.disaggregated_params").Raw + "," + top[1:]
	got, err := after(c, session(t, connector.APIChat, `{"messages":[{"content":"Hello"}]}`), top)
	require.NoError(t, err)
	assert.Contains(t, got.Body, handedOn, "at the top of the response, too")

	bare := `{"choices":[{"finish_reason":"not_finished","disaggregated_params":{"ctx_request_id":7,` +
		`"disagg_request_id":` + id + `,"first_gen_tokens":[1]}}]}`
	got, err = after(c, session(t, connector.APICompletions, `{"prompt":"Hello"}`), bare)
	require.NoError(t, err)
	assert.Equal(t, `{"prompt":"Hello","disaggregated_params":{"ctx_request_id":7,"disagg_request_id":`+id+
		`,"first_gen_tokens":[1],"request_type":"generation_only"}}`, got.Body)
}

// A release that does not tell the attempt's id back may write it as null. Its D finds the KV by ctx_request_id.
func TestAnIDThatIsNullIsNotTold(t *testing.T) {
	const params = `{"ctx_request_id":7,"disagg_request_id":null,"first_gen_tokens":[1]`
	got, err := after(open(t, ``), session(t, connector.APICompletions, `{"prompt":"Hello"}`),
		`{"choices":[{"finish_reason":"length","disaggregated_params":`+params+`}}]}`)
	require.NoError(t, err)
	assert.Equal(t, `{"prompt":"Hello","disaggregated_params":`+params+`,"request_type":"generation_only"}}`, got.Body)
}

// 1.2.1 refuses parameters that it does not know. P's have the key ctx_usage if its release knows it, also as null.
func TestUsageGoesToReleasesThatKnowIt(t *testing.T) {
	const params = `{"ctx_request_id":7,"disagg_request_id":` + id + `,"first_gen_tokens":[1]`
	for told, want := range map[string]string{``: ``, `,"ctx_usage":null`: `{"prompt_tokens":2}`,
		`,"ctx_usage":{"prompt_tokens":9}`: `{"prompt_tokens":2}`} {
		got, err := after(open(t, ``), session(t, connector.APICompletions, `{"prompt":"Hello"}`),
			`{"usage":{"prompt_tokens":2},"choices":[{"finish_reason":"length","disaggregated_params":`+
				params+told+`}}]}`)
		require.NoError(t, err)
		assert.Equal(t, want, gjson.Get(got.Body, "disaggregated_params.ctx_usage").Raw, told)
	}
}

func TestAnswersWithoutAHandoffAreRefused(t *testing.T) {
	c := open(t, `{"authKey":"k"}`)
	choice := func(params string) string {
		return `{"choices":[{"finish_reason":"length","disaggregated_params":` + params + `}]}`
	}
	for rule, bad := range map[string]string{
		"not JSON": `oops`,
		"a list":   `[]`,
		"broken within": `{"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":1,` +
			`"first_gen_tokens":[1],"disagg_request_id":` + id + `,"a":[1,}]}}]}`,
		"broken deeper": choice(`{"ctx_request_id":1,"first_gen_tokens":[1],"disagg_request_id":` + id +
			`,"a":[1,]}`),
		"usage broken":      strings.Replace(response, `{"prompt_tokens":2}`, `{"prompt_tokens":[2,]}`, 1),
		"no choices":        `{}`,
		"choices null":      `{"choices":null}`,
		"choices an object": `{"choices":{}}`,
		"no choice":         `{"choices":[]}`,
		"two choices": `{"choices":[{"disaggregated_params":{"ctx_request_id":1,"first_gen_tokens":[1],` +
			`"disagg_request_id":` + id + `}},{}]}`,
		"choice no object": `{"choices":[1]}`,
		"no parameters":    `{"choices":[{"finish_reason":"length"}]}`,
		"null":             choice(`null`),
		"text":             choice(`"x"`),
		"twice": choice(`{"ctx_request_id":1,"first_gen_tokens":[1],"disagg_request_id":` + id +
			`,"a":1,"a":2}`),
		"no ctx_request_id":   choice(`{"disagg_request_id":` + id + `}`),
		"null ctx_request_id": choice(`{"ctx_request_id":null,"disagg_request_id":` + id + `}`),
		"id a fraction":       choice(`{"ctx_request_id":1.5,"disagg_request_id":` + id + `}`),
		"id too large":        choice(`{"ctx_request_id":1,"disagg_request_id":9223372036854775808}`),
		"id negative":         choice(`{"ctx_request_id":1,"disagg_request_id":-2}`),
		"token ids text":      strings.Replace(response, `[1,15043]`, `["a"]`, 1),
		"token ids fractions": strings.Replace(response, `[1,15043]`, `[1.5]`, 1),
		"token ids none":      strings.Replace(response, `[1,15043]`, `[]`, 1),
		"token ids no list":   strings.Replace(response, `[1,15043]`, `"12"`, 1),
		"usage text":          strings.Replace(response, `{"prompt_tokens":2}`, `"x"`, 1),
		"cancelled":           strings.Replace(response, `"length"`, `"cancelled"`, 1),
		"timeout":             strings.Replace(response, `"length"`, `"timeout"`, 1),
		"state no string": choice(`{"ctx_request_id":1,"first_gen_tokens":[1],"disagg_request_id":` + id +
			`,"encoded_opaque_state":{"a":1}}`),
		"state half a surrogate": choice(`{"ctx_request_id":1,"first_gen_tokens":[1],"disagg_request_id":` + id +
			`,"encoded_opaque_state":"\ud800"}`),
		"another attempt's id": strings.Replace(response, `"disagg_request_id":`+id,
			`"disagg_request_id":9223372036854775807`, 1),
		"no first token":     strings.Replace(response, `"first_gen_tokens":[278]`, `"x":1`, 1),
		"first token null":   strings.Replace(response, `[278]`, `null`, 1),
		"first token none":   strings.Replace(response, `[278]`, `[]`, 1),
		"first token text":   strings.Replace(response, `[278]`, `["a"]`, 1),
		"draft tokens text":  strings.Replace(response, `"draft_tokens":null`, `"draft_tokens":"x"`, 1),
		"rank text":          strings.Replace(response, `"draft_tokens":null`, `"ctx_dp_rank":"0"`, 1),
		"rank negative":      strings.Replace(response, `"draft_tokens":null`, `"ctx_dp_rank":-1`, 1),
		"state a number":     strings.Replace(response, `"b64"`, `1`, 1),
		"endpoint an object": strings.Replace(response, `"encoded_opaque_state":"b64"`, `"ctx_info_endpoint":{}`, 1),
		"not UTF-8":          strings.Replace(response, `b64`, "\xff", 1),
		"endpoint a number": choice(`{"ctx_request_id":1,"first_gen_tokens":[1],"disagg_request_id":` + id +
			`,"ctx_info_endpoint":[5]}`),
	} {
		_, err := after(c, session(t, connector.APICompletions, `{"prompt":"x"}`), bad)
		require.ErrorIs(t, err, connector.ErrNoTransfer, rule)
		assert.NotContains(t, err.Error(), "15043", rule)
	}
	_, err := play.TryDecode(c, session(t, connector.APICompletions, `{"prompt":"x"}`), nil)
	require.ErrorIs(t, err, connector.ErrNoTransfer, "not before P has answered")
}

// An id is above 2^42, so it is never a server's own. It contains the machine's number, is different for each attempt,
// and is the same on both legs.
func TestIDs(t *testing.T) {
	seen := map[string]bool{}
	for _, machine := range []int{0, 1, 1023} {
		c := open(t, `{"dispatch":"generation-first","machineID":`+strconv.Itoa(machine)+`}`)
		for range 1000 {
			s := play.Session(t, connector.APICompletions, `{"prompt":"x"}`)
			known, err := c.(connector.Preparer).Prepare(t.Context(), s, func(*http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(info))}, nil
			})
			require.NoError(t, err)
			s.Prepared = known
			p := gjson.Get(play.Prefill(t, c, s).Body, "disaggregated_params.disagg_request_id").Raw
			d := play.Decode(t, c, s, nil).Body
			require.Equal(t, p, gjson.Get(d, "disaggregated_params.disagg_request_id").Raw)
			require.Equal(t, p, gjson.Get(d, "disaggregated_params.ctx_request_id").Raw)
			require.False(t, seen[p])
			seen[p] = true
			n, err := strconv.ParseInt(p, 10, 64)
			require.NoError(t, err)
			require.Greater(t, n, int64(1)<<42)
			require.EqualValues(t, machine, n>>52&1023)
		}
	}
}

func TestSettings(t *testing.T) {
	play.Refuses(t, "TensorRT-LLM", map[string]string{
		`{"dispatch":"both"}`: "dispatch", `{"machineID":1024}`: "machineID", `{"machineID":-1}`: "machineID",
		`{"machineId":1}`: "machineId", `{"authKey":7}`: "authKey",
		`{"transferTimeout":"0s"}`: "transferTimeout", `{"transferTimeout":"-1s"}`: "transferTimeout",
	})
}

// The logits of the prompt are in P's response alone.
func TestUnsupported(t *testing.T) {
	for body, member := range map[string]string{`{"prompt":"a","return_context_logits":true}`: "return_context_logits",
		`{"prompt":"a","return_context_logits":false}`: "", `{"prompt":"a","return_context_logits":null}`: "",
		`{"prompt":"a","prompt_logprobs":1}`: "prompt_logprobs", `{"prompt":"a"}`: ""} {
		c := open(t, ``)
		assert.Equal(t, member, play.Uncarried(c, session(t, connector.APICompletions, body).Request), body)
	}
}
