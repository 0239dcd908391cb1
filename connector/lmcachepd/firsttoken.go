// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// This file describes the legs of retFirstTok: P's token is the answer's first, and D goes on from it. LMCache's proxy asks an engine to
// tokenize for that; here P itself says which tokens the prompt has (return_token_ids, docs/protocols/vllm.md §9), so
// that nothing is rendered twice, and no tools or template can be forgotten.

// firstTokenLeg asks P for the token ids, too. If the client wants at least one token, P must not end before it.
func firstTokenLeg(r *connector.Request, leg *connector.Leg) {
	leg.Set("return_token_ids", json.RawMessage("true"))
	if minimum, ok := number(r, "min_tokens"); ok && minimum >= 1 {
		leg.Set("min_tokens", json.RawMessage("1"))
	}
}

// answer is P's answer as D and the client need it.
type answer struct {
	api    connector.API
	prompt json.RawMessage // the prompt's token ids, a JSON array
	token  string          // P's token id
	text   string          // P's token as text
	member string          // of a chat's message in which it stands: content, reasoning, reasoning_content
	reason string          // finish_reason
	stop   string          // stop_reason, as JSON
}

// messageTexts are the members of a chat's message that hold what the model said.
var messageTexts = []string{"content", "reasoning", "reasoning_content"}

// readAnswer reads P's answer. The error is [connector.ErrNoTransfer] and names members, never values.
func readAnswer(api connector.API, p *connector.PrefillResult) (*answer, error) {
	if p == nil {
		return nil, connector.NoTransfer("decode was described before prefill answered")
	}
	// Each part that is used is looked into; the whole is not, since most of it are the token ids, which are read once.
	choices, okChoices := part(p, "choices")
	handoff, okParams := part(p, connector.ParamsMember)
	if p.Err() != nil || !okChoices || !okParams {
		return nil, connector.NoTransfer("the answer is not one JSON object")
	}
	a := &answer{api: api}
	choice := choices.Get("0")
	token := handoff.Get("first_tok")
	if token.Type != gjson.Number || !isToken(token.Raw) {
		return nil, connector.NoTransfer("kv_transfer_params.first_tok is not a token id")
	}
	a.token = token.Raw
	if api == connector.APIChat {
		a.prompt, _ = p.Field("prompt_token_ids")
	} else {
		a.prompt = json.RawMessage(choice.Get("prompt_token_ids").Raw)
	}
	if !areTokens(a.prompt) {
		return nil, connector.NoTransfer("prompt_token_ids is not a list of token ids")
	}
	a.reason = choice.Get("finish_reason").Str
	if a.reason != "length" && a.reason != "stop" {
		return nil, connector.NoTransfer("finish_reason is neither length nor stop")
	}
	if api == connector.APIChat {
		message := choice.Get("message")
		a.member = messageTexts[0]
		for _, name := range messageTexts {
			if v := message.Get(name); v.Type == gjson.String && v.Str != "" {
				a.member, a.text = name, v.Str
				break
			}
		}
		if !message.IsObject() {
			return nil, connector.NoTransfer("choices[0].message is not an object")
		}
	} else {
		text := choice.Get("text")
		if text.Type != gjson.String {
			return nil, connector.NoTransfer("choices[0].text is not a string")
		}
		a.text = text.Str
	}
	a.stop = rawOf(choice.Get("stop_reason"))
	return a, nil
}

// part is a member of the answer, nothing if it is absent or null; ok is false if it is malformed.
func part(p *connector.PrefillResult, name string) (v gjson.Result, ok bool) {
	raw, there := p.Field(name)
	if !there {
		return v, true
	}
	return gjson.ParseBytes(raw), json.Valid(raw)
}

// rawOf is a member as JSON, null where it is missing.
func rawOf(v gjson.Result) string {
	if v.Exists() {
		return v.Raw
	}
	return "null"
}

// isToken wants a whole number from 0 on, in digits.
func isToken(raw string) bool {
	_, err := strconv.ParseUint(raw, 10, 63)
	return err == nil
}

// areTokens wants [1,2,3], whole numbers in digits, one at least. Nothing is known of what stands between the brackets.
func areTokens(raw []byte) bool {
	if len(raw) < 2 || raw[0] != '[' || raw[len(raw)-1] != ']' {
		return false
	}
	for rest := raw[1:]; ; { // the last byte, a bracket, ends each of the loops
		i := spaceEnd(rest, 0)
		start := i
		for rest[i]-'0' <= 9 {
			i++
		}
		if n := i - start; n == 0 || n > 1 && rest[start] == '0' {
			return false
		}
		i = spaceEnd(rest, i)
		if rest[i] != ',' {
			return rest[i] == ']' && i+1 == len(rest)
		}
		rest = rest[i+1:]
	}
}

// spaceEnd is where the white space from i on ends.
func spaceEnd(s []byte, i int) int {
	for s[i] == ' ' || s[i] == '\n' || s[i] == '\t' || s[i] == '\r' {
		i++
	}
	return i
}

// defaultCompletion is vLLM's max_tokens of a completion that names none (vllm/entrypoints/openai/completion/protocol.py).
const defaultCompletion = 16

// continueIn makes the decode leg go on after the token: the prompt is P's tokens and the token, and one token less is wanted. The first
// event's text, and the counts, are put right on the way back.
func (a *answer) continueIn(r *connector.Request, leg *connector.Leg) error {
	const params, end = `{"prompt_token_ids":`, `]}`
	both := make([]byte, 0, len(params)+len(a.prompt)+1+len(a.token)+len(end))
	both = append(append(both, params...), a.prompt[:len(a.prompt)-1]...)
	both = append(append(append(both, ','), a.token...), end...)
	if r.API == connector.APIChat {
		// Rendered from the tokens, whatever the messages say (vLLM 48145; docs/protocols/nixl.md, recording 02b). Nothing
		// else may be in there.
		leg.Params(both)
	} else {
		leg.Set("prompt", both[len(params):len(both)-1])
	}
	leg.Delete("truncate_prompt_tokens") // P's tokens are what it left
	member, limit, given := limitOf(r)
	switch {
	case given && limit > 1:
		leg.Set(member, connector.Int(limit-1))
	case !given && r.API == connector.APICompletions:
		if raw, there := leg.Current(member); !there || jsonedit.Kind(raw) != jsonedit.Null { // null fills the context, however long the prompt
			leg.Set(member, connector.Int(defaultCompletion-1))
		}
	}
	if minimum, ok := number(r, "min_tokens"); ok && minimum >= 1 {
		leg.Set("min_tokens", connector.Int(minimum-1))
	}
	return nil
}

// limitOf returns the member that limits the answer, and the limit, if there is one.
func limitOf(r *connector.Request) (member string, limit int64, given bool) {
	member = "max_tokens"
	if r.API == connector.APIChat {
		if n, ok := number(r, "max_completion_tokens"); ok {
			return "max_completion_tokens", n, true // wins (docs/protocols/nixl.md, recording 06)
		}
	}
	limit, given = number(r, member)
	return member, limit, given
}

// number reads a whole number, which the flow has checked to be one, also where it is written as 16.0.
func number(r *connector.Request, member string) (int64, bool) {
	raw, ok := r.Field(member)
	if !ok {
		return 0, false
	}
	if n, ok := jsonedit.Int(raw); ok {
		return n, true
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || f < -(1<<53) || f > 1<<53 {
		return 0, false
	}
	return int64(f), true
}

// unsupportedWithFirstToken returns the member by which a request depends on the first token being D's own, or "".
//
//   - tools and structured output: D's parser and grammar would begin in the middle;
//   - logprobs, return_token_ids, echo: what D reports of its prompt and its tokens is one token off;
//   - stop: a stop string may begin in P's token, and D would not see it;
//   - presence_penalty, frequency_penalty: D takes P's token for a part of the prompt;
//   - messages with media: prompt_token_ids holds text only (docs/protocols/vllm.md §9).
func unsupportedWithFirstToken(r *connector.Request) string {
	for _, name := range []string{
		"tools", "tool_choice", "functions", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
		"guided_grammar", "structural_tag", "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids", "echo", "stop", "suffix", "prompt_embeds",
		"presence_penalty", "frequency_penalty",
	} {
		if raw, ok := r.Field(name); ok && !idle(raw) {
			return name
		}
	}
	if r.API == connector.APIChat {
		if raw, ok := r.Field("messages"); ok && hasMedia(raw) {
			return "messages"
		}
	}
	return ""
}

// idle says whether a member asks for nothing: false, 0, "", [], {}, "none" or {"type": "text"}.
func idle(raw json.RawMessage) bool {
	switch v := gjson.ParseBytes(raw); v.Type {
	case gjson.False, gjson.Null:
		return true
	case gjson.Number:
		return v.Num == 0
	case gjson.String:
		return v.Str == "" || v.Str == "none"
	case gjson.JSON:
		return v.Get("#").Int() == 0 && v.IsArray() || bytes.Equal(raw, []byte("{}")) || v.Get("type").Str == "text"
	default:
		return false
	}
}

// hasMedia says whether a chat's messages hold a part that is not text.
func hasMedia(messages json.RawMessage) bool {
	if !bytes.Contains(messages, []byte(`"type"`)) {
		return false // the common case, without a parse
	}
	found := false
	gjson.ParseBytes(messages).ForEach(func(_, m gjson.Result) bool {
		if c := m.Get("content"); c.IsArray() {
			c.ForEach(func(_, part gjson.Result) bool {
				found = found || part.IsObject() && part.Get("type").Str != "text"
				return !found
			})
		}
		return !found
	})
	return found
}
