// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// sample is a client's request.
type sample struct {
	api  connector.API
	name string
	body string
}

// String names the sample for a message.
func (s sample) String() string { return s.api.String() + ", " + s.name }

// shape is where an API keeps what the rules are about. It says on purpose again what package connector says: a suite
// that asked the code under test for the members would find right whatever that code does.
type shape struct {
	prompt   string // members that hold the prompt
	holder   string // the member that holds the sampling members, "" for the top level
	limit    string // the limit of tokens
	alt      string // the limit that wins, where there are two
	minimum  string
	choices  []string // members that ask for several choices
	logprobs string   // members that ask for log probabilities
	wasted   []string // their names, and others that only cost on P
}

const promptText = `"` + plantedPrompt + ` \u00e9 \ud83d\ude00 \"<\/s>\" e"`
const messages = `"messages":[{"role":"user","content":` + promptText + `}]`

var openAIWasted = []string{"logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "echo"}

var shapes = map[connector.API]shape{
	connector.APIChat: {prompt: messages, limit: "max_tokens", alt: "max_completion_tokens", minimum: "min_tokens",
		choices: []string{"n", "best_of"}, logprobs: `"logprobs":true,"top_logprobs":3`, wasted: openAIWasted},
	connector.APICompletions: {prompt: `"prompt":` + promptText, limit: "max_tokens", minimum: "min_tokens",
		choices: []string{"n", "best_of"}, logprobs: `"logprobs":3`, wasted: openAIWasted},
	connector.APIResponses: {prompt: `"input":` + promptText, limit: "max_output_tokens", minimum: "min_tokens",
		logprobs: `"top_logprobs":3`, wasted: []string{"top_logprobs"}},
	connector.APIMessages: {prompt: messages, limit: "max_tokens", minimum: "min_tokens"},
	connector.APIGenerate: {prompt: `"token_ids":[101,102,103,104]`, holder: "sampling_params", limit: "max_tokens",
		minimum: "min_tokens",
		choices: []string{"n", "best_of"}, logprobs: `"logprobs":3`, wasted: openAIWasted},
	connector.APISGLang: {prompt: `"text":` + promptText, holder: "sampling_params", limit: "max_new_tokens",
		minimum: "min_new_tokens",
		choices: []string{"n"}},
}

// others are members that no API's legs may alter: an unknown one, escaped names and values, numbers that a float would
// change.
const others = `"seed":9007199254740993,"x_unknown":{"deep":[1.0,1e5,-0,{"k":"\/\u0041",` +
	`"k":123456789012345678901234567890}],"n":null,"twice":1,"twice":2.0},"x\u005fescaped":"\u0061\ud83d\ude00",` +
	`"temperature":0.70,"user":"someone"`

// body puts members and sampling members where the API has them.
func (s shape) body(sampling string, members ...string) string {
	if sampling != "" && s.holder != "" {
		sampling = `"` + s.holder + `":{` + sampling + `,"x_inner":[1.50,{"a":"\u0062"}]}`
	}
	list := append([]string{`"model":"` + modelName + `"`, s.prompt, sampling}, members...)
	return "{" + strings.Join(slices.DeleteFunc(list, func(m string) bool { return m == "" }), ",") + "}"
}

// plain is the simplest request of an API.
func plain(api connector.API) sample {
	return sample{api, "plain", shapes[api].body("")}
}

func plains(api connector.API) []sample { return []sample{plain(api)} }

// samples are the requests of an API with which a leg's members are checked. Each can be carried by any protocol that
// carries the API.
func samples(api connector.API) []sample {
	s := shapes[api]
	minimum := func(n int) string { return fmt.Sprintf(`"%s":%d`, s.minimum, n) }
	limit := func(name string, n int) string { return fmt.Sprintf(`"%s":%d`, name, n) }
	join := func(parts ...string) string {
		return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p == "" }), ",")
	}
	var one []string
	for _, name := range s.choices {
		one = append(one, `"`+name+`":1`)
	}
	list := []sample{
		plain(api),
		{api, "with a limit", s.body(limit(s.limit, 64), others)},
		{api, "with a limit and a minimum", s.body(join(limit(s.limit, 64), minimum(5)), others)},
		{api, "with a minimum alone", s.body(minimum(5), others)},
		{api, "with a limit of null", s.body(`"`+s.limit+`":null`, others)},
		{api, "streamed", s.body(limit(s.limit, 64), `"stream":true`, others)},
		{api, "streamed with usage", s.body(limit(s.limit, 64), `"stream":true,"stream_options":{"include_usage":true}`,
			others)},
		{api, "not streamed", s.body("", `"stream":false`, others)},
		{api, "with log probabilities and one response",
			s.body(join(limit(s.limit, 64), s.logprobs, join(one...)), others)},
		{api, "with a cut prompt", s.body("", `"truncate_prompt_tokens":3`)},
		{api, "in odd spelling", " {\n\t\"m\\u006fdel\" : \"" + modelName + "\" ,\r\n " + s.prompt +
			" , \"stream\"\t:\ttrue, " + others + "\n}\n"},
	}
	if s.alt != "" {
		list = append(list,
			sample{api, "with the limit that wins", s.body(join(limit(s.alt, 64), minimum(2)), others)},
			sample{api, "with both limits", s.body(join(limit(s.limit, 64), limit(s.alt, 32)), others)})
	}
	if api == connector.APIMessages {
		list = append(
			list, sample{api, "with a thinking budget",
				s.body(`"max_tokens":2048,"thinking":{"type":"enabled","budget_tokens":1024}`, others)},
		)
	}
	if s.holder != "" {
		list = append(list, sample{api, "with sampling members of null", s.body("", `"`+s.holder+`":null`, others)})
	}
	return list
}

// several are requests that only some protocols carry.
func several(api connector.API) []sample {
	s := shapes[api]
	var list []sample
	for _, name := range s.choices {
		list = append(list, sample{api, "with " + name + " of 3", s.body(`"` + name + `":3`)})
	}
	return list
}

// forged are requests with the client's own transfer members, wherever engines read them and however their names are
// spelt.
func forged(api connector.API, declared []string) []sample {
	all := forgery{}
	all.add("request_id", "")
	all.add("rid", "")
	for _, path := range append(slices.Clone(transferMembers), declared...) {
		name, below, _ := strings.Cut(path, ".")
		all.add(name, below)
		if !strings.Contains(path, ".") {
			for _, holder := range []string{"vllm_xargs", "sampling_params"} {
				all.add(holder, path)
				all.add(holder, "extra_args."+path)
			}
		}
	}
	plainly := func(name string) string { return `"` + name + `"` }
	escaped := func(name string) string { return fmt.Sprintf(`"\u%04x%s"`, name[0], name[1:]) }
	return []sample{
		{api, "with transfer members", shapes[api].body("", all.members(plainly))},
		{api, "with transfer members in odd spelling", shapes[api].body("", all.members(escaped))},
	}
}

// forgery is an object of the client's; nil stands for a value that must not reach an engine.
type forgery map[string]forgery

// add puts such a value at a path below a name.
func (f forgery) add(name, below string) {
	inner, there := f[name]
	switch {
	case below == "":
		f[name] = nil
	case there && inner == nil: // all of it must go
	default:
		if inner == nil {
			inner = forgery{}
			f[name] = inner
		}
		next, rest, _ := strings.Cut(below, ".")
		inner.add(next, rest)
	}
}

func (f forgery) members(spell func(name string) string) string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(f)) {
		value := `{"do_remote_prefill":true,"x":"` + plantedClient + `","transfer_id":"` + plantedClient + `"}`
		if inner := f[name]; inner != nil {
			value = "{" + inner.members(spell) + `,"x_kept":1}`
		}
		list = append(list, spell(name)+":"+value)
	}
	return strings.Join(list, ",")
}

// responseTexts are engines' whole responses of one token, ended by length, without any transfer member.
var responseTexts = map[connector.API]string{
	connector.APIChat: `{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,` +
		`"message":{"role":"assistant","content":"a"},` +
		`"logprobs":null,"finish_reason":"length","token_ids":null}],"usage":{"prompt_tokens":4,"total_tokens":5,` +
		`"completion_tokens":1}}`,
	connector.APICompletions: `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m",` +
		`"choices":[{"index":0,"text":"a","logprobs":null,` +
		`"finish_reason":"length","stop_reason":null}],"usage":{"prompt_tokens":4,"total_tokens":5,` +
		`"completion_tokens":1}}`,
	connector.APIResponses: `{"id":"resp_1","object":"response","created_at":1,"model":"m","status":"incomplete",` +
		`"incomplete_details":{"reason":"max_output_tokens"},` +
		`"output":[{"type":"message","id":"msg_1","role":"assistant","status":"incomplete",` +
		`"content":[{"type":"output_text","text":"a","annotations":[]}]}],` +
		`"usage":{"input_tokens":4,"output_tokens":1,"total_tokens":5}}`,
	connector.APIMessages: `{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"text",` +
		`"text":"a"}],"stop_reason":"max_tokens",` +
		`"usage":{"input_tokens":4,"output_tokens":1}}`,
	connector.APIGenerate: `{"request_id":"generate-1","choices":[{"index":0,"token_ids":[7],"logprobs":null,` +
		`"finish_reason":"length"}],"prompt_logprobs":null}`,
	connector.APISGLang: `{"text":"a","output_ids":[7],"meta_info":{"id":"1","finish_reason":{"type":"length",` +
		`"length":1},"prompt_tokens":4,"completion_tokens":1,` +
		`"cached_tokens":0}}`,
}
