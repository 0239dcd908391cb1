// SPDX-License-Identifier: Apache-2.0

// Package api has the client APIs of the simulated engines: how a request becomes generations, and how their tokens
// become a response, whole or streamed. Each API has a file.
package api

import (
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// Call is one request of a client API, parsed: the generations it asks for and how its response is written.
type Call struct {
	id           string // of the response
	model        string
	known        bool // the model was named
	created      int  // Unix seconds
	Stream       bool
	options      *streamOptions
	greedy       bool
	N            int
	maxTokens    int // 0 when the client named none
	limited      bool
	minTokens    int
	limitName    string
	defaultLimit int // 0 fills the context up to DefaultMaxTokens
	Params       core.Params
	Gens         []*core.Generation
	streamParams bool // Engine.StreamParams
	anyOptions   bool // stream_options may stand without stream
	demand       demand
	Background   bool  // nobody waits for the response
	kept         *Kept // where the response is kept; nil: nowhere

	sse  *SSE
	made []int // tokens of each generation that a stream has written
	format
}

type streamOptions struct {
	IncludeUsage    bool `json:"include_usage"`
	ContinuousUsage bool `json:"continuous_usage_stats"`

	given bool // the object is not empty
}

func (o *streamOptions) UnmarshalJSON(data []byte) error {
	type plain streamOptions
	o.given = string(data) != "{}"
	return json.Unmarshal(data, (*plain)(o))
}

// format writes the responses of one API.
type format interface {
	// Whole is a response that is not streamed.
	Whole(outs []*core.Outcome) any
	// begin opens a stream; step and end write to it.
	begin()
	step(st core.Step)
	end(outs []*core.Outcome)
}

// Begin opens a stream.
func (c *Call) Begin(s *SSE) {
	c.sse, c.made = s, make([]int, len(c.Gens))
	c.begin()
}

// Step writes what one token adds to a stream.
func (c *Call) Step(st core.Step) {
	c.step(st)
	if st.HasOne {
		c.made[st.Index]++
	}
}

// End ends a stream.
func (c *Call) End(outs []*core.Outcome) { c.end(outs) }

// chunk is a chunk of a chat's or a completion's stream, as far as all chunks are alike.
func (c *Call) chunk(object string, choices []python.Object) python.Object {
	return python.Object{"id", c.id, "object", object, "created", c.created, "model", c.model, "choices", choices}
}

// told adds what a step's chunk of a chat or a completion tells besides: the usage, if the client wants that of each
// chunk, and at the end the fingerprint and the transfer's parameters.
func (c *Call) told(chunk python.Object, s core.Step) python.Object {
	if c.options != nil && c.options.ContinuousUsage {
		made := c.made[s.Index]
		if s.HasOne {
			made++
		}
		chunk = append(chunk, "usage", counted(len(c.Gens[s.Index].Prompt), made))
	}
	if s.Reason != "" && !c.wantsUsage() {
		chunk = append(chunk, "system_fingerprint", fingerprint)
	}
	if c.streamParams {
		chunk = append(chunk, "kv_transfer_params", s.Params)
	}
	return chunk
}

// close ends a stream. If the client wants the usage, it comes in a chunk of its own, with more members.
func (c *Call) close(chunk python.Object, outs []*core.Outcome, chat bool, more ...any) {
	if c.wantsUsage() {
		c.sse.json(append(append(chunk, "usage", c.usage(outs, chat, false)), more...))
	}
	c.sse.done()
}

// when is a member that is null unless the client asks for it.
func when(asked bool, v any) any {
	if asked {
		return v
	}
	return nil
}

// reasonOrNull is a finish_reason: a stream's choices have none before the last.
func reasonOrNull(reason string) any { return when(reason != "", reason) }

// sampling has the members that most APIs share.
type sampling struct {
	Model         *string         `json:"model"`
	Stream        bool            `json:"stream"`
	StreamOptions *streamOptions  `json:"stream_options"`
	MaxTokens     *whole          `json:"max_tokens"`
	MinTokens     whole           `json:"min_tokens"`
	N             *whole          `json:"n"`
	Temperature   *float64        `json:"temperature"`
	Seed          *uint64         `json:"seed"`
	Stop          oneOrMany       `json:"stop"`
	StopTokenIDs  []int32         `json:"stop_token_ids"`
	IncludeStop   bool            `json:"include_stop_str_in_output"`
	CacheSalt     string          `json:"cache_salt"`
	RequestID     string          `json:"request_id"`
	KVParams      json.RawMessage `json:"kv_transfer_params"`
	ReturnTokens  bool            `json:"return_token_ids"`
	PromptLogs    *whole          `json:"prompt_logprobs"`
}

// whole is an integer as pydantic reads one: also 16.0, and true for 1.
type whole int

func (w *whole) UnmarshalJSON(data []byte) error {
	var f float64
	switch err := json.Unmarshal(data, (*int)(w)); {
	case err == nil:
	case string(data) == "true":
		*w = 1
	case string(data) == "false":
		*w = 0
	case json.Unmarshal(data, &f) == nil && f == math.Trunc(f) && math.Abs(f) < 1<<63 &&
		strings.ContainsAny(string(data), ".eE"):
		*w = whole(f)
	default:
		return err
	}
	return nil
}

// flag is a boolean as pydantic reads one: also 0 and 1.
type flag bool

func (b *flag) UnmarshalJSON(data []byte) error {
	var f float64
	err := json.Unmarshal(data, (*bool)(b))
	if err != nil && json.Unmarshal(data, &f) == nil && (f == 0 || f == 1) {
		*b, err = f == 1, nil
	}
	return err
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

// DecodeBody reads a request's JSON into v; its errors are those of the API.
func DecodeBody(body []byte, v any) *Error {
	err := json.Unmarshal(body, v)
	var wrong *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong):
		kind := map[bool]string{true: "int", false: "string"}[strings.HasPrefix(wrong.Type.Kind().String(), "int")]
		field := strings.TrimPrefix(strings.TrimPrefix(wrong.Field, "sampling."), "tooling.")
		return BadField(field, kind+"_type", "Input should be a valid "+kind,
			"'<"+wrong.Value+">'")
	default:
		return BadField("", "json_invalid", "JSON decode error", "{}")
	}
}

// decodeCall reads a request's JSON into q, of which s is a part, and starts its call.
func decodeCall(body []byte, q any, s *sampling) (*Call, *Error) {
	if bad := DecodeBody(body, q); bad != nil {
		return nil, bad
	}
	return newCall(s)
}

// DecodeParams reads kv_transfer_params, which may be an object or null.
func DecodeParams(raw json.RawMessage) (core.Params, *Error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var params core.Params
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
	return nil, BadField("kv_transfer_params", "dict_type", "Input should be a valid dictionary", input)
}

// newCall starts a call from the members that most APIs share.
func newCall(s *sampling) (*Call, *Error) {
	params, bad := DecodeParams(s.KVParams)
	if bad != nil {
		return nil, bad
	}
	c := &Call{
		Stream: s.Stream, options: s.StreamOptions, created: int(time.Now().Unix()), minTokens: int(s.MinTokens),
		Params: params, limitName: "max_tokens", N: 1, greedy: s.Temperature != nil && *s.Temperature == 0,
	}
	if s.Model != nil {
		c.model, c.known = *s.Model, true
	}
	if s.N != nil {
		c.N = int(*s.N)
	}
	c.limit(s.MaxTokens)
	return c, nil
}

func (c *Call) limit(tokens *whole) {
	if tokens != nil {
		c.maxTokens, c.limited = int(*tokens), true
	}
}

// OneToken limits a call to one token, whatever the client asked for.
func (c *Call) OneToken() {
	c.maxTokens, c.limited, c.minTokens = 1, true, min(c.minTokens, 1)
	for _, g := range c.Gens {
		g.MinTokens = min(g.MinTokens, 1)
	}
}

// add makes the generations of one prompt.
func (c *Call) add(s *sampling, id string, prompt []int32, local bool) {
	for child := range max(c.N, 1) {
		g := &core.Generation{
			ID: id + "-" + core.RandomHex(4), Name: id, Prompt: prompt, MinTokens: int(s.MinTokens), Stop: s.Stop,
			StopIDs: s.StopTokenIDs, IncludeEnd: s.IncludeStop,
			Salt: s.CacheSalt, Params: c.Params, Local: local || s.PromptLogs != nil, Children: c.N,
			Variant: uint64(child),
		}
		if c.N > 1 {
			g.ID, g.Name = strconv.Itoa(child)+"_"+g.ID, strconv.Itoa(child)+"_"+g.Name
		}
		if s.Seed != nil && !c.greedy {
			g.Variant = core.Mix(*s.Seed, uint64(child)+1)
		}
		c.Gens = append(c.Gens, g)
	}
}

// CheckRank refuses a data-parallel rank that is not behind this server. A rank that is no number is ignored, and so is
// each on /v1/responses.
func CheckRank(e *Engine, r *http.Request) *Error {
	n, err := strconv.Atoi(r.Header.Get("X-data-parallel-rank"))
	if err == nil && e.Ranks > 0 && r.URL.Path != "/v1/responses" && (n < 0 || n >= e.Ranks) {
		return BadRequest("", "data_parallel_rank %d is out of range [0, %d).", n, e.Ranks)
	}
	return nil
}

// Check refuses what vLLM's API refuses, with the same message.
func (c *Call) Check(e *Engine) *Error {
	adapter := c.known && c.model != e.Model && e.Adapters.has(c.model)
	if c.known && c.model != e.Model && !adapter {
		bad := BadRequest("model", "The model `%s` does not exist. Valid aliases: %s.", c.model, e.Model)
		bad.Type, bad.Code = "NotFoundError", http.StatusNotFound
		return bad
	}
	if adapter { // its KV and its text are not those of the model
		for _, g := range c.Gens {
			g.Salt += "\x00" + c.model
			g.Variant = core.Mix(g.Variant, core.KeyOf(core.Tokenise(c.model))[0])
		}
	} else {
		c.model = e.Model
	}
	switch {
	case c.options != nil && c.options.given && !c.Stream && !c.anyOptions:
		return BadRequest("stream_options",
			"Stream options can only be defined when `stream=True`. (parameter=stream_options)")
	case c.N < 1:
		return BadRequest("", "n must be at least 1, got %d.", c.N)
	case c.N > 1 && c.greedy:
		return BadRequest("", "n must be 1 when using greedy sampling, got %d.", c.N)
	case c.limited && c.maxTokens < 1:
		return BadRequest(c.limitName, "%s must be at least 1, got %d. (parameter=%s, value=%d)", c.limitName,
			c.maxTokens, c.limitName, c.maxTokens)
	case c.minTokens < 0:
		return BadRequest("", "min_tokens must be greater than or equal to 0, got %d.", c.minTokens)
	}
	for _, g := range c.Gens {
		if bad := c.fit(e, g); bad != nil {
			return bad
		}
	}
	return nil
}

// fit checks a prompt's length and settles how long its response may get.
func (c *Call) fit(e *Engine, g *core.Generation) *Error {
	limit, length := e.MaxModelLen, len(g.Prompt)
	switch {
	case length == 0:
		return BadRequest("prompt", "The decoder prompt cannot be empty")
	case length >= limit:
		return BadRequest("input_tokens",
			"This model's maximum context length is %d tokens. However, your prompt contains at least "+
				"%d input tokens, which exceeds this limit even without any output tokens. Please reduce the "+
				"length of the input prompt. (parameter=input_tokens, value=%d)", limit, limit+1, limit+1)
	}
	for _, token := range g.Prompt {
		if token < 0 || token >= core.Vocabulary {
			return BadRequest("prompt", "Token id %d is out of vocabulary", token)
		}
	}
	switch {
	case c.limited && length+c.maxTokens > limit:
		return BadRequest(c.limitName,
			"This model's maximum context length is %d tokens. However, you requested %d output tokens and your "+
				"prompt contains %d input tokens, for a total of %d tokens. Please reduce the length of the input "+
				"prompt or the number of requested output tokens. (parameter=%s, value=%d)",
			limit, c.maxTokens, length, length+c.maxTokens, c.limitName, c.maxTokens)
	case c.limited:
		g.MaxTokens = c.maxTokens
	case c.defaultLimit > 0:
		g.MaxTokens = min(c.defaultLimit, limit-length)
	default:
		g.MaxTokens = min(e.DefaultMaxTokens, limit-length)
	}
	if c.minTokens > g.MaxTokens {
		return BadRequest("", "min_tokens must be less than or equal to max_tokens=%d, got %d.", g.MaxTokens,
			c.minTokens)
	}
	return nil
}

// Came notes the HTTP request that a call came with.
func (c *Call) Came(r *http.Request, body []byte) {
	for _, g := range c.Gens {
		g.Origin = core.Origin{Header: r.Header, Path: r.URL.Path, Body: body}
	}
}

// requestName is the client's id of a request: the header wins over the body.
func requestName(r *http.Request, body string) string {
	if name := r.Header.Get("X-Request-Id"); name != "" {
		return name
	}
	if body != "" {
		return body
	}
	return core.RandomHex(8)
}
