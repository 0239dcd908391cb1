// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// call is one request of a client API, parsed: the generations it asks for and
// how its answer is written.
type call struct {
	model        string
	known        bool // the model was named
	created      int64
	stream       bool
	options      *streamOptions
	greedy       bool
	n            int
	maxTokens    int // 0 when the client named none
	limited      bool
	minTokens    int
	limitName    string
	defaultLimit int // 0 fills the context up to DefaultMaxTokens
	params       kvParams
	gens         []*generation

	format
}

type streamOptions struct {
	IncludeUsage    bool `json:"include_usage"`
	ContinuousUsage bool `json:"continuous_usage_stats"`
}

// format writes the responses of one API.
type format interface {
	// whole is a response that is not streamed.
	whole(outs []*outcome) any
	// begin opens a stream; step and end write to it.
	begin(s *sse)
	step(st step)
	end(outs []*outcome)
}

// sampling is what the APIs have in common, in its usual spelling.
type sampling struct {
	Model         *string         `json:"model"`
	Stream        bool            `json:"stream"`
	StreamOptions *streamOptions  `json:"stream_options"`
	MaxTokens     *int            `json:"max_tokens"`
	MinTokens     int             `json:"min_tokens"`
	N             *int            `json:"n"`
	Temperature   *float64        `json:"temperature"`
	Seed          *uint64         `json:"seed"`
	Stop          oneOrMany       `json:"stop"`
	StopTokenIDs  []int32         `json:"stop_token_ids"`
	IncludeStop   bool            `json:"include_stop_str_in_output"`
	CacheSalt     string          `json:"cache_salt"`
	RequestID     string          `json:"request_id"`
	KVParams      json.RawMessage `json:"kv_transfer_params"`
	ReturnTokens  bool            `json:"return_token_ids"`
	PromptLogs    *int            `json:"prompt_logprobs"`
}

// oneOrMany is a string or a list of strings.
type oneOrMany []string

func (o *oneOrMany) UnmarshalJSON(data []byte) error {
	var one string
	if json.Unmarshal(data, &one) == nil {
		*o = nil
		if one != "" {
			*o = oneOrMany{one}
		}
		return nil
	}
	var many []string
	if err := json.Unmarshal(data, &many); err != nil {
		return err
	}
	*o = many
	return nil
}

// decodeBody reads a request's JSON into v; its errors are those of the API.
func decodeBody(body []byte, v any) *apiError {
	err := json.Unmarshal(body, v)
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong):
		kind := map[bool]string{true: "int", false: "string"}[strings.HasPrefix(wrong.Type.Kind().String(), "int")]
		return badField(strings.TrimPrefix(wrong.Field, "sampling."), kind+"_type", "Input should be a valid "+kind, "'<"+wrong.Value+">'")
	default:
		return badField("", "json_invalid", "JSON decode error", "{}")
	}
}

// decodeCall reads a request's JSON into q, of which s is a part, and starts its call.
func decodeCall(body []byte, q any, s *sampling) (*call, *apiError) {
	if bad := decodeBody(body, q); bad != nil {
		return nil, bad
	}
	return newCall(s)
}

// decodeParams reads kv_transfer_params, which may be an object or null.
func decodeParams(raw json.RawMessage) (kvParams, *apiError) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var params kvParams
	if json.Unmarshal(raw, &params) == nil {
		return params, nil
	}
	input := string(raw)
	var text string
	var list []json.RawMessage
	switch {
	case json.Unmarshal(raw, &text) == nil:
		input = "'" + text + "'"
	case json.Unmarshal(raw, &list) == nil:
		input = "'<list of " + strconv.Itoa(len(list)) + " items>'"
	case input == "true":
		input = "True"
	case input == "false":
		input = "False"
	}
	return nil, badField("kv_transfer_params", "dict_type", "Input should be a valid dictionary", input)
}

// newCall starts a call from the common fields. The call is there also with an
// error that releases a handoff.
func newCall(s *sampling) (*call, *apiError) {
	params, bad := decodeParams(s.KVParams)
	if bad != nil {
		return nil, bad
	}
	c := &call{
		stream: s.Stream, options: s.StreamOptions, created: time.Now().Unix(), minTokens: s.MinTokens, params: params, limitName: "max_tokens",
		n: 1, greedy: s.Temperature != nil && *s.Temperature == 0,
	}
	if s.Model != nil {
		c.model, c.known = *s.Model, true
	}
	if s.N != nil {
		c.n = *s.N
	}
	c.limit(s.MaxTokens)
	return c, nil
}

func (c *call) limit(tokens *int) {
	if tokens != nil {
		c.maxTokens, c.limited = *tokens, true
	}
}

// add makes the generations of one prompt.
func (c *call) add(s *sampling, id string, prompt []int32, local bool) {
	index := len(c.gens) / max(c.n, 1)
	for child := range max(c.n, 1) {
		g := &generation{
			id: id + "-" + randomHex(4), name: id, index: index, prompt: prompt, minTokens: s.MinTokens, stop: s.Stop, stopIDs: s.StopTokenIDs, includeEnd: s.IncludeStop,
			salt: s.CacheSalt, params: c.params, local: local || s.PromptLogs != nil, children: c.n, variant: uint64(child),
		}
		if c.n > 1 {
			g.id, g.name = strconv.Itoa(child)+"_"+g.id, strconv.Itoa(child)+"_"+g.name
		}
		if s.Seed != nil && !c.greedy {
			g.variant = mix(*s.Seed, uint64(child)+1)
		}
		c.gens = append(c.gens, g)
	}
}

// check refuses what vLLM's API refuses, in its words.
func (c *call) check(e *target) *apiError {
	if c.known && c.model != e.model {
		bad := badRequest("model", "The model `%s` does not exist. Valid aliases: %s.", c.model, e.model)
		bad.Type, bad.Code = "NotFoundError", http.StatusNotFound
		return bad
	}
	c.model = e.model
	switch {
	case c.options != nil && !c.stream:
		return badRequest("stream_options", "Stream options can only be defined when `stream=True`. (parameter=stream_options)")
	case c.n < 1:
		return badRequest("", "n must be at least 1, got %d.", c.n)
	case c.n > 1 && c.greedy:
		return badRequest("", "n must be 1 when using greedy sampling, got %d.", c.n)
	case c.limited && c.maxTokens < 1:
		return badRequest(c.limitName, "%s must be at least 1, got %d. (parameter=%s, value=%d)", c.limitName, c.maxTokens, c.limitName, c.maxTokens)
	case c.minTokens < 0:
		return badRequest("", "min_tokens must be greater than or equal to 0, got %d.", c.minTokens)
	}
	for _, g := range c.gens {
		if bad := c.fit(e, g); bad != nil {
			return bad
		}
	}
	return nil
}

// fit checks a prompt's length and settles how long its answer may get.
func (c *call) fit(e *target, g *generation) *apiError {
	limit, length := e.maxModelLen, len(g.prompt)
	switch {
	case length == 0:
		return badRequest("prompt", "The decoder prompt cannot be empty")
	case length >= limit:
		return badRequest("input_tokens", "This model's maximum context length is %d tokens. However, your prompt contains at least %d input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%d)", limit, limit+1, limit+1)
	}
	for _, token := range g.prompt {
		if token < 0 || token >= vocabulary {
			return badRequest("prompt", "Token id %d is out of vocabulary", token)
		}
	}
	switch {
	case c.limited && length+c.maxTokens > limit:
		return badRequest(c.limitName, "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains %d input tokens, for a total of %d tokens. Please reduce the length of the input prompt or the number of requested output tokens. (parameter=%s, value=%d)", limit, c.maxTokens, length, length+c.maxTokens, c.limitName, c.maxTokens)
	case c.limited:
		g.maxTokens = c.maxTokens
	case c.defaultLimit > 0:
		g.maxTokens = min(c.defaultLimit, limit-length)
	default:
		g.maxTokens = min(e.defaultMaxTokens, limit-length)
	}
	if c.minTokens > g.maxTokens {
		return badRequest("", "min_tokens must be less than or equal to max_tokens=%d, got %d.", g.maxTokens, c.minTokens)
	}
	return nil
}

// came notes the HTTP request behind a call.
func (c *call) came(r *http.Request, body []byte) {
	o := &origin{header: r.Header, path: r.URL.Path, body: body, stream: c.stream}
	for _, g := range c.gens {
		g.origin = o
	}
}

// withMembers adds what a connector has to say to a whole answer.
func withMembers(data []byte, outs []*outcome) []byte {
	if !slices.ContainsFunc(outs, func(o *outcome) bool { return o.members != nil || o.choice != nil }) {
		return data
	}
	var answer map[string]json.RawMessage
	if json.Unmarshal(data, &answer) != nil {
		return data
	}
	var choices []map[string]json.RawMessage
	_ = json.Unmarshal(answer["choices"], &choices)
	for i, o := range outs {
		for name, v := range o.members {
			answer[name] = encode(v)
		}
		for name, v := range o.choice {
			if i < len(choices) {
				choices[i][name] = encode(v)
			}
		}
	}
	if choices != nil {
		answer["choices"] = encode(choices)
	}
	return encode(answer)
}

// requestName is the client's id of a request: the header wins over the body.
func requestName(r *http.Request, body string) string {
	if name := r.Header.Get("X-Request-Id"); name != "" {
		return name
	}
	if body != "" {
		return body
	}
	return randomHex(8)
}
