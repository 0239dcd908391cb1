// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// This file builds the legs of retFirstTok: P's token is the first of the response, and D continues after it. For that,
// LMCache's proxy asks an engine to tokenize the prompt. Here P itself returns the prompt's token ids
// (return_token_ids, docs/protocols/vllm.md §9), so nothing is rendered twice, and no tools or template can be
// forgotten.

// firstTokenLeg also asks P for the token ids. If the client wants at least one token, P must not end before it.
func firstTokenLeg(r *connector.ClientRequest, leg *connector.Leg) {
	leg.Set("return_token_ids", json.RawMessage("true"))
	if minimum, ok := number(r, "min_tokens"); ok && minimum >= 1 {
		leg.Set("min_tokens", json.RawMessage("1"))
	}
}

// prefillResponse holds the parts of P's response that D and the client need.
type prefillResponse struct {
	api    connector.API
	prompt json.RawMessage // the prompt's token ids, a JSON array
	token  string          // P's token id
	text   string          // P's token as text
	member string          // the member of a chat's message that has the text: content, reasoning, reasoning_content
	reason string          // finish_reason
	stop   string          // stop_reason, as JSON
}

// messageTexts are the members of a chat's message that hold text of the model.
var messageTexts = []string{"content", "reasoning", "reasoning_content"}

// readResponse reads P's response. The error is [connector.ErrNoTransfer] and names members, never values.
func readResponse(api connector.API, p *connector.PrefillResult) (*prefillResponse, error) {
	if p == nil {
		return nil, handoff.NoTransfer("decode was described before prefill answered")
	}
	// Only the parts that are used are checked. Most of the response are token ids, which are read only once, in
	// handoff.TokenIDs.
	choices, okChoices := part(p, "choices")
	params, okParams := part(p, connector.ParamsMember)
	if p.Err() != nil || !okChoices || !okParams {
		return nil, handoff.NoTransfer("the response is not one JSON object")
	}
	a := &prefillResponse{api: api}
	choice := choices.Get("0")
	token := params.Get("first_tok")
	if token.Type != gjson.Number || !isToken(token.Raw) {
		return nil, handoff.NoTransfer("kv_transfer_params.first_tok is not a token id")
	}
	a.token = token.Raw
	if api == connector.APIChat {
		a.prompt, _ = p.Field("prompt_token_ids")
	} else {
		a.prompt = json.RawMessage(choice.Get("prompt_token_ids").Raw)
	}
	if !handoff.TokenIDs(a.prompt) {
		return nil, handoff.NoTransfer("prompt_token_ids is not a list of token ids")
	}
	a.reason = choice.Get("finish_reason").Str
	if a.reason != "length" && a.reason != "stop" {
		return nil, handoff.NoTransfer("finish_reason is neither length nor stop")
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
			return nil, handoff.NoTransfer("choices[0].message is not an object")
		}
	} else {
		text := choice.Get("text")
		if text.Type != gjson.String {
			return nil, handoff.NoTransfer("choices[0].text is not a string")
		}
		a.text = text.Str
	}
	a.stop = rawOf(choice.Get("stop_reason"))
	return a, nil
}

// part is a member of the response, or an empty result if it is absent or null. ok is false if it is malformed.
func part(p *connector.PrefillResult, name string) (v gjson.Result, ok bool) {
	raw, there := p.Field(name)
	if !there {
		return v, true
	}
	return gjson.ParseBytes(raw), json.Valid(raw)
}

// rawOf is a member as JSON, or null if it is missing.
func rawOf(v gjson.Result) string {
	if v.Exists() {
		return v.Raw
	}
	return "null"
}

// isToken reports whether raw is a whole number of 0 or more, in digits.
func isToken(raw string) bool {
	_, err := strconv.ParseUint(raw, 10, 63)
	return err == nil
}

// defaultCompletion is vLLM's max_tokens for a completion without one (vllm/entrypoints/openai/completion/protocol.py).
const defaultCompletion = 16

// continueIn makes the decode leg continue after P's token: the prompt is P's token ids and the token, and the limit is
// one token less. Rewrite later corrects the first event's text and the counts.
func (a *prefillResponse) continueIn(r *connector.ClientRequest, leg *connector.Leg) error {
	const params, end = `{"prompt_token_ids":`, `]}`
	both := make([]byte, 0, len(params)+len(a.prompt)+1+len(a.token)+len(end))
	both = append(append(both, params...), a.prompt[:len(a.prompt)-1]...)
	both = append(append(append(both, ','), a.token...), end...)
	if r.API == connector.APIChat {
		// D takes the prompt from these tokens, whatever the messages say (vLLM 48145; docs/protocols/nixl.md,
		// recording 02b). The object may have no other members.
		leg.Params(both)
	} else {
		leg.Set("prompt", both[len(params):len(both)-1])
	}
	leg.Delete("truncate_prompt_tokens") // P's token ids are already truncated
	member, limit, given := limitOf(r)
	switch {
	case given && limit > 1:
		leg.Set(member, connector.Int(limit-1))
	case !given && r.API == connector.APICompletions:
		// null means that the response may fill the context, however long the prompt is.
		if raw, there := leg.Current(member); !there || jsonedit.Kind(raw) != jsonedit.Null {
			leg.Set(member, connector.Int(defaultCompletion-1))
		}
	}
	if minimum, ok := number(r, "min_tokens"); ok && minimum >= 1 {
		leg.Set("min_tokens", connector.Int(minimum-1))
	}
	return nil
}

// limitOf returns the member that limits the response's tokens, and its value if it has one.
func limitOf(r *connector.ClientRequest) (member string, limit int64, given bool) {
	member = "max_tokens"
	if r.API == connector.APIChat {
		if n, ok := number(r, "max_completion_tokens"); ok {
			return "max_completion_tokens", n, true // vLLM prefers it (docs/protocols/nixl.md, recording 06)
		}
	}
	limit, given = number(r, member)
	return member, limit, given
}

// number reads a whole number, also one that is written as 16.0. The flow has checked that it is whole.
func number(r *connector.ClientRequest, member string) (int64, bool) {
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

// unsupportedWithFirstToken returns the member that needs D to make the first token itself, or "".
//
//   - tools and structured output: D's parser and grammar would begin in the middle;
//   - logprobs, return_token_ids, echo: what D reports of its prompt and its tokens is one token off;
//   - stop: a stop string may begin in P's token, and D would not see it;
//   - presence_penalty, frequency_penalty: D takes P's token for a part of the prompt;
//   - messages with media: prompt_token_ids holds text only (docs/protocols/vllm.md §9).
func unsupportedWithFirstToken(r *connector.ClientRequest) string {
	for _, name := range []string{
		"tools", "tool_choice", "functions", "response_format", "structured_outputs", "guided_json", "guided_regex",
		"guided_choice", "guided_grammar", "structural_tag", "logprobs", "top_logprobs", "logprob_token_ids",
		"return_token_ids", "echo", "stop", "suffix", "prompt_embeds", "presence_penalty", "frequency_penalty",
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

// idle reports whether a member asks for nothing: false, 0, "", [], {}, "none" or {"type": "text"}.
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

// hasMedia reports whether a chat's messages hold a part that is not text.
func hasMedia(messages json.RawMessage) bool {
	if !bytes.Contains(messages, []byte(`"type"`)) {
		return false // most chats end here, without parsing
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
