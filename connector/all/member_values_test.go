// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/internal/play"
)

// measured is what an engine's own request models say to values of one member, see lab/engines/members.py.
type measured struct {
	Member  string // with dots between nested names
	Body    json.RawMessage
	Accepts []json.RawMessage
	Refuses []json.RawMessage
}

// stricter are the values that pdkit refuses although engines accept them, with the reason. Each is three regular
// expressions for the whole text of an API, a member without its object, and a value.
var stricter = []struct{ reason, api, member, value string }{
	{"pdkit reads limits itself, as OpenAI's API has them: no number in a string, no boolean for a number", ".*",
		"max_tokens|max_completion_tokens|max_output_tokens|min_tokens|n", `"1"|true|false`},
	{"the same for the flag that makes a stream", ".*", "stream", `"1"|"true"|0|1|1\.0`},
	{"the same for token ids, budgets and counts", ".*",
		"logprob_token_ids|thinking|logprobs|prompt_logprobs|top_logprobs|stop_token_ids",
		`\["1"\]|\[true\]|"1"|\{"type":"enabled","budget_tokens":"1024"\}`},
	{"engines read more than 64 bits, and then refuse it for its context, cut it to that, or do not use it", ".*",
		"(max|min)(_completion|_output|_new)?_tokens|logprobs", `-?\d{19,}`},
	{"SGLang generates nothing then; OpenAI's API and vLLM refuse it", "chat", "max_tokens|max_completion_tokens", "0"},
	{"vLLM ignores these, and older versions or other engines do not", "chat|completions", "prompt_logprob_token_ids",
		".*"},
	{"the same", "chat|completions|generate", "best_of", ".*"},
	{"the same", "responses|messages", "min_tokens", ".*"},
	{"engines ignore it", "responses|messages|sglang", "stream_options", ".*"},
	{"as for limits: no number in a string, no boolean, no more than 64 bits", "generate",
		"prompt_logprob_start", `"1"|true|false|\d{19,}`},
	{"vLLM ignores it without include", "responses", "top_logprobs", `-?\d+`},
}

const (
	vllmValues   = "vllm-0.32.0-member-values.json"
	sglangValues = "sglang-0.5.23-member-values.json"
)

// What an engine refuses and its P cannot see, pdkit refuses before P computes the prompt; and it refuses nothing that
// the engine accepts, but for what is in stricter.
func TestMemberValuesAgainstTheEnginesOwnModels(t *testing.T) {
	used := map[int]bool{}
	for name, file := range map[string]string{
		"nixl":            vllmValues, // the usual prefill leg
		"mooncake-ascend": vllmValues, // one that must end by length
		"sharedstorage":   vllmValues, // several choices can read its handoff
		"sglang":          sglangValues,
	} {
		c := play.Open(t, name, needed[name])
		t.Run(name, func(t *testing.T) {
			for api, members := range memberValues(t, file) {
				for _, m := range members {
					accepted(t, c, api, m, used)
					refused(t, c, api, m)
				}
			}
		})
	}
	for k, s := range stricter {
		assert.True(t, used[k], "no value needs %v", s)
	}
}

func accepted(t *testing.T, c connector.KVConnector, api connector.API, m measured, used map[int]bool) {
	for _, value := range m.Accepts {
		body := with(t, m.Body, m.Member, value)
		if refused, ok := errors.AsType[*connector.RequestError](refusal(c, api, body)); ok {
			k := meantStricter(api, m.Member, value)
			assert.NotEqual(t, -1, k, "%s accepts %s: %v", api, body, refused)
			used[k] = true
		}
	}
}

func refused(t *testing.T, c connector.KVConnector, api connector.API, m measured) {
	for _, value := range m.Refuses {
		body := with(t, m.Body, m.Member, value)
		if refusal(c, api, body) == nil {
			assert.Empty(t, hidden(t, c, api, body, m.Member), "%s refuses %s", api, body)
		}
	}
}

// meantStricter returns the index of the entry in stricter, or -1.
func meantStricter(api connector.API, member string, value json.RawMessage) int {
	return slices.IndexFunc(stricter, func(s struct{ reason, api, member, value string }) bool {
		whole := func(pattern, text string) bool {
			return regexp.MustCompile("^(?:" + pattern + ")$").MatchString(text)
		}
		return whole(s.api, api.String()) && whole(s.member, strings.TrimPrefix(member, "sampling_params.")) &&
			whole(s.value, string(value))
	})
}

func memberValues(t *testing.T, file string) map[connector.API][]measured {
	raw, err := os.ReadFile("../testdata/" + file)
	require.NoError(t, err)
	engine := object(t, raw)
	values := map[connector.API][]measured{}
	for _, api := range connector.APIs() {
		if raw, ok := engine[api.String()]; ok {
			var all []measured
			require.NoError(t, json.Unmarshal(raw, &all))
			values[api] = all
		}
	}
	return values
}

// with returns a body in which the member at a path has a value.
func with(t *testing.T, body []byte, path string, value json.RawMessage) []byte {
	name, rest, nested := strings.Cut(path, ".")
	members := object(t, body)
	if nested {
		value = with(t, members[name], rest, value)
	}
	members[name] = value
	raw, err := json.Marshal(members)
	require.NoError(t, err)
	return raw
}

func refusal(c connector.KVConnector, api connector.API, body []byte) error {
	r, err := connector.ParseRequest(api, body)
	if err != nil {
		return err
	}
	return check.Of(c).CheckRequest(r)
}

// hidden returns the members of a request that P does not see as the client sent them. A null that P sees is enough:
// engines refuse it by itself.
func hidden(t *testing.T, c connector.KVConnector, api connector.API, body []byte, member string) []string {
	body = compact(t, body)
	leg := play.Prefill(t, c, play.Session(t, api, string(body), reachable, reachable)) // what P gets
	paths := lost(t, body, []byte(leg.Body))
	if gjson.GetBytes(body, member).Type == gjson.Null && !slices.Contains(paths, member) {
		return nil
	}
	return paths
}

func compact(t *testing.T, body []byte) []byte {
	var b bytes.Buffer
	require.NoError(t, json.Compact(&b, body))
	return b.Bytes()
}
