// SPDX-License-Identifier: Apache-2.0

// Package rescue lets streams outlive their decode engines: how a stream goes on as a completion of its tokens, and how
// many of them an engine prefills at a time.
package rescue

import (
	"encoding/json"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/resume"
)

// Plan is how a request's stream can go on at another pair: as a completion of its tokens.
type Plan struct {
	req     *connector.ClientRequest // the client's
	limit   int                      // of tokens; 0: none
	least   int                      // min_tokens
	reach   int                      // see resume.Config
	shown   bool                     // include_stop_str_in_output
	keepIDs bool
	usage   bool // the client asked for it
}

// carried are the members that mean the same to a completion that goes on.
var carried = []string{"model", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
	"skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "repetition_penalty", "cache_salt",
	"priority", "user"}

// spent are members that a completion which goes on does not need: they make the prompt, whose tokens are known, or do
// nothing to a greedy response, or Plan replaces them.
var spent = []string{"messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens",
	"min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "return_token_ids", "request_id",
	"add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs",
	"documents", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}

// neutral are members that a request may have with these values.
var neutral = map[string][]string{"n": {"1"}, "best_of": {"1"}, "logprobs": {"false"}, "top_logprobs": {"0"},
	"echo": {"false"}, "tools": {"[]"}, "tool_choice": {`"none"`}, "response_format": {`{"type":"text"}`},
	"presence_penalty": {"0", "0.0"}, "frequency_penalty": {"0", "0.0"}, "use_beam_search": {"false"}}

// PlanOf says how a request's stream could go on, or by the name of a member why it cannot.
func PlanOf(req *connector.ClientRequest) (p *Plan, reason string) {
	chat := req.API == connector.APIChat
	if !chat && req.API != connector.APICompletions {
		return nil, "api"
	}
	body := gjson.ParseBytes(req.Body())
	if t := body.Get("temperature"); t.Type != gjson.Number || t.Num != 0 {
		return nil, "temperature"
	}
	body.ForEach(func(key, value gjson.Result) bool {
		name := key.String()
		if value.Type != gjson.Null && !slices.Contains(carried, name) && !slices.Contains(spent, name) &&
			!slices.Contains(neutral[name], value.Raw) {
			reason = "member" // a client's word must not become a metric's label
			if neutral[name] != nil {
				reason = name
			}
		}
		return reason == ""
	})
	if reason != "" {
		return nil, reason
	}
	if reason = promptOf(body, chat); reason != "" {
		return nil, reason
	}
	p = &Plan{req: req, least: int(body.Get("min_tokens").Int()), shown: body.Get("include_stop_str_in_output").Bool(),
		keepIDs: body.Get("return_token_ids").Bool(), usage: body.Get("stream_options.include_usage").Bool()}
	limit := body.Get("max_tokens")
	if m := body.Get("max_completion_tokens"); chat && m.Exists() && m.Type != gjson.Null {
		limit = m
	}
	switch {
	case limit.Exists() && limit.Type != gjson.Null:
		var err error
		if p.limit, err = strconv.Atoi(limit.Raw); err != nil || p.limit < 1 {
			return nil, "max_tokens"
		}
	case !chat:
		p.limit = 16 // vLLM's default
	}
	var ok bool
	if p.reach, ok = stopReach(body.Get("stop")); !ok {
		return nil, "stop"
	}
	return p, ""
}

// promptOf says why a prompt's tokens are not all that the engine got, "" if they are.
func promptOf(body gjson.Result, chat bool) string {
	if !chat {
		if p := body.Get("prompt"); p.Type == gjson.String || p.IsArray() && p.Get("0").Type == gjson.Number {
			return ""
		}
		return "prompt"
	}
	reason := ""
	body.Get("messages").ForEach(func(_, m gjson.Result) bool {
		if content := m.Get("content"); content.IsArray() {
			content.ForEach(func(_, part gjson.Result) bool {
				if part.Type != gjson.String && part.Get("type").Str != "text" {
					reason = "media"
				}
				return reason == ""
			})
		}
		return reason == ""
	})
	return reason
}

// stopReach is the length of the longest stop string, less one, in characters.
func stopReach(stop gjson.Result) (reach int, ok bool) {
	var one string
	var all []string
	switch {
	case !stop.Exists() || stop.Type == gjson.Null:
	case json.Unmarshal([]byte(stop.Raw), &one) == nil:
		all = []string{one}
	case json.Unmarshal([]byte(stop.Raw), &all) != nil:
		return 0, false
	}
	for _, s := range all {
		reach = max(reach, utf8.RuneCountInString(s)-1)
	}
	return reach, true
}

// Config says how the stream's tokens are kept. failureStop is the stop_reason with which the engine gives up, "" for
// none; usage gets an event with the counts that the client did not ask for.
func (p *Plan) Config(failureStop string, usage func(event []byte)) resume.Config {
	var asked []byte
	if p.req.API == connector.APICompletions {
		asked, _ = p.req.Field("prompt")
	}
	return resume.Config{Asked: asked, Chat: p.req.API == connector.APIChat, KeepIDs: p.keepIDs, KeepUsage: p.usage,
		StopReach: p.reach, StopShown: p.shown, Limit: p.limit, FailureStop: failureStop, Usage: usage}
}

// Unlimited reports whether only the engine's context limits the stream.
func (p *Plan) Unlimited() bool { return p.limit == 0 }

// Request makes the request that lets s go on. context is how many tokens fit into an engine's context; it is needed
// for an unlimited chat, since a completion without one ends after 16 tokens. counted asks for the token counts
// even if the client did not.
func (p *Plan) Request(s *resume.Stream, context int, counted bool) (*connector.ClientRequest, error) {
	b := append([]byte(`{"stream":true,"temperature":0,"prompt":`), s.Prompt()...)
	set := func(name string, raw []byte) { b = append(append(append(b, `,"`+name+`":`...), raw...), ' ') }
	limit := p.limit - s.Given()
	if p.limit == 0 {
		limit = context - s.Length()
	}
	set("max_tokens", strconv.AppendInt(nil, int64(max(1, limit)), 10))
	if least := p.least - s.Given(); least > 0 {
		set("min_tokens", strconv.AppendInt(nil, int64(least), 10))
	}
	if raw, ok := p.req.Field("stream_options"); ok && p.usage {
		set("stream_options", raw)
	} else if counted {
		set("stream_options", []byte(`{"include_usage":true}`))
	}
	for _, name := range carried {
		if raw, ok := p.req.Field(name); ok {
			set(name, raw)
		}
	}
	return connector.ParseRequest(connector.APICompletions, append(b, '}'))
}
