// SPDX-License-Identifier: Apache-2.0

package api

import (
	"encoding/json"
	"net/http"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

type responsesRequest struct {
	sampling
	Input           json.RawMessage   `json:"input"`
	Instructions    *string           `json:"instructions"`
	MaxOutputTokens *whole            `json:"max_output_tokens"`
	Tools           []json.RawMessage `json:"tools"`
	TopP            *float64          `json:"top_p"`
	Metadata        json.RawMessage   `json:"metadata"`
	User            *string           `json:"user"`
	ToolChoice      json.RawMessage   `json:"tool_choice"`
	Parallel        *bool             `json:"parallel_tool_calls"`
	Text            struct {
		Format json.RawMessage `json:"format"`
	} `json:"text"`
}

// parseResponses reads a /v1/responses request. Its ids come from the body alone: the header X-Request-Id is not read
// there.
func parseResponses(_ *Engine, _ *http.Request, body []byte) (*Call, *Error) {
	var q responsesRequest
	c, bad := decodeCall(body, &q, &q.sampling)
	if bad != nil {
		return nil, bad
	}
	c.N, c.maxTokens, c.limited, c.limitName = 1, 0, false, "max_output_tokens"
	c.anyOptions = true
	c.limit(q.MaxOutputTokens)
	messages, bad := responsesInput(q.Input)
	if bad != nil {
		return nil, bad
	}
	if q.Instructions != nil {
		messages = append([]chatMessage{{Role: "system", Content: chatContent(*q.Instructions)}}, messages...)
	}
	prompt := render(messages, q.Tools, true)
	if ids, ok := promptTokens(c.Params); ok {
		prompt = ids
	}
	id := q.RequestID
	if id == "" {
		id = "resp_" + core.RandomHex(8)
	}
	c.add(&q.sampling, id+"_0", prompt, false)
	d := chosen(q.Tools, q.ToolChoice, q.Parallel == nil || *q.Parallel).orElse(formatted(q.Text.Format))
	c.guide(d)
	c.format = &responsesFormat{call: c, q: &q, id: id, message: "msg_" + core.RandomHex(8), demand: d}
	return c, nil
}

// responsesInput reads text, or a list of messages.
func responsesInput(raw json.RawMessage) ([]chatMessage, *Error) {
	var text string
	if json.Unmarshal(raw, &text) == nil && text != "" {
		return []chatMessage{{Role: "user", Content: chatContent(text)}}, nil
	}
	var messages []chatMessage
	if json.Unmarshal(raw, &messages) != nil || len(messages) == 0 {
		return nil, BadField("input", "string_type", "Input should be a valid string", "'<input>'")
	}
	return messages, nil
}

type responsesFormat struct {
	call        *Call
	q           *responsesRequest
	id, message string
	sse         *SSE
	seq         int
	text        string
	demand      demand
	within      calling
	made        []responsesCall // in the stream so far
}

type responsesText struct {
	Annotations []any  `json:"annotations"`
	Text        string `json:"text"`
	Type        string `json:"type"`
	Logprobs    any    `json:"logprobs"`
}

type responsesMessage struct {
	ID      string          `json:"id"`
	Content []responsesText `json:"content"`
	Role    string          `json:"role"`
	Status  string          `json:"status"`
	Type    string          `json:"type"`
	Phase   any             `json:"phase"`
}

type responsesCall struct {
	Arguments string `json:"arguments"`
	CallID    string `json:"call_id"`
	Name      string `json:"name"`
	Type      string `json:"type"`
	ID        string `json:"id"`
	Status    string `json:"status"`
}

type responsesUsage struct {
	Input        int `json:"input_tokens"`
	InputDetails struct {
		Cached        int   `json:"cached_tokens"`
		Written       int   `json:"cache_write_tokens"`
		PerTurn       []int `json:"input_tokens_per_turn"`
		CachedPerTurn []int `json:"cached_tokens_per_turn"`
	} `json:"input_tokens_details"`
	Output        int `json:"output_tokens"`
	OutputDetails struct {
		Reasoning   int   `json:"reasoning_tokens"`
		Tools       int   `json:"tool_output_tokens"`
		PerTurn     []int `json:"output_tokens_per_turn"`
		ToolPerTurn []int `json:"tool_output_tokens_per_turn"`
	} `json:"output_tokens_details"`
	Total int `json:"total_tokens"`
}

type responsesBody struct {
	ID               string            `json:"id"`
	CreatedAt        int64             `json:"created_at"`
	Incomplete       any               `json:"incomplete_details"`
	Instructions     *string           `json:"instructions"`
	Metadata         json.RawMessage   `json:"metadata"`
	Model            string            `json:"model"`
	Object           string            `json:"object"`
	Output           []any             `json:"output"` // responsesMessage or responsesCall
	ParallelTools    bool              `json:"parallel_tool_calls"`
	Temperature      json.RawMessage   `json:"temperature"`
	ToolChoice       any               `json:"tool_choice"`
	Tools            []json.RawMessage `json:"tools"`
	TopP             json.RawMessage   `json:"top_p"`
	Background       bool              `json:"background"`
	MaxOutputTokens  int               `json:"max_output_tokens"`
	MaxToolCalls     any               `json:"max_tool_calls"`
	Previous         any               `json:"previous_response_id"`
	Prompt           any               `json:"prompt"`
	Reasoning        any               `json:"reasoning"`
	ServiceTier      string            `json:"service_tier"`
	Status           string            `json:"status"`
	Text             any               `json:"text"`
	TopLogprobs      any               `json:"top_logprobs"`
	Truncation       string            `json:"truncation"`
	Usage            *responsesUsage   `json:"usage"`
	User             *string           `json:"user"`
	PresencePenalty  json.RawMessage   `json:"presence_penalty"`
	FrequencyPenalty json.RawMessage   `json:"frequency_penalty"`
	KVParams         any               `json:"kv_transfer_params"`
	ECParams         any               `json:"ec_transfer_params"`
	InputMessages    any               `json:"input_messages"`
	OutputMessages   any               `json:"output_messages"`
}

// float writes a number as Python does: 0.0, not 0.
func float(v *float64, otherwise float64) json.RawMessage {
	if v == nil {
		v = &otherwise
	}
	return json.RawMessage(python.Number(*v))
}

// shell is the response without its output.
func (f *responsesFormat) shell(status string) *responsesBody {
	c, q := f.call, f.q
	b := &responsesBody{
		ID: f.id, CreatedAt: c.created, Instructions: q.Instructions, Metadata: q.Metadata, Model: c.model,
		Object: "response",
		Output: []any{}, ParallelTools: true, Temperature: float(q.Temperature, 1), ToolChoice: "none",
		Tools: q.Tools,
		TopP:  float(q.TopP, 1), MaxOutputTokens: c.Gens[0].MaxTokens, ServiceTier: "auto", Status: status,
		Truncation: "disabled", User: q.User,
		PresencePenalty: float(nil, 0), FrequencyPenalty: float(nil, 0),
	}
	if b.Tools == nil {
		b.Tools = []json.RawMessage{}
	} else {
		b.ToolChoice = "auto"
	}
	if len(q.ToolChoice) > 0 {
		b.ToolChoice = q.ToolChoice
	}
	return b
}

func (f *responsesFormat) item(status, text string) responsesMessage {
	return responsesMessage{
		ID: f.message, Role: "assistant", Status: status, Type: "message",
		Content: []responsesText{{Annotations: []any{}, Text: text, Type: "output_text"}},
	}
}

func (f *responsesFormat) Whole(outs []*core.Outcome) any {
	o := outs[0]
	b := f.shell("completed")
	if o.Reason != core.ReasonStop {
		b.Status = "incomplete"
		b.Incomplete = map[string]string{"reason": "max_output_tokens"}
	}
	calls := f.made
	if calls == nil {
		for _, c := range f.demand.calls(o.Tokens, responsesCallID) {
			calls = append(calls, f.called(c, "completed"))
		}
	}
	for _, c := range calls {
		b.Output = append(b.Output, c)
	}
	if f.demand.tools == nil {
		b.Output = append(b.Output, f.item("completed", o.Text))
	}
	u := &responsesUsage{Input: len(f.call.Gens[0].Prompt), Output: len(o.Tokens)}
	u.Total = u.Input + u.Output
	u.InputDetails.Cached, u.InputDetails.Written = o.Cached, o.Created
	u.InputDetails.PerTurn, u.InputDetails.CachedPerTurn = []int{}, []int{}
	u.OutputDetails.PerTurn, u.OutputDetails.ToolPerTurn = []int{}, []int{}
	b.Usage, b.KVParams = u, o.Params
	return b
}

// send writes one typed event with its number.
func (f *responsesFormat) send(kind string, fields map[string]any) {
	fields["type"], fields["sequence_number"] = kind, f.seq
	f.seq++
	f.sse.named(kind, python.Encode(fields))
}

func (f *responsesFormat) Begin(s *SSE) {
	f.sse = s
	f.send("response.created", map[string]any{"response": f.shell("in_progress")})
	f.send("response.in_progress", map[string]any{"response": f.shell("in_progress")})
}

func (f *responsesFormat) part(text string) map[string]any {
	return map[string]any{"annotations": []any{}, "text": text, "type": "output_text", "logprobs": []any{}}
}

func (f *responsesFormat) at(fields map[string]any) map[string]any {
	fields["item_id"], fields["output_index"], fields["content_index"] = f.message, 0, 0
	return fields
}

func (f *responsesFormat) Step(s core.Step) {
	if f.demand.tools != nil {
		f.callStep(s)
		return
	}
	if f.seq == 2 {
		item := f.item("in_progress", "")
		item.Content = []responsesText{}
		f.send("response.output_item.added", map[string]any{"output_index": 0, "item": item})
		f.send("response.content_part.added", f.at(map[string]any{"part": f.part("")}))
	}
	if s.Text != "" {
		f.text += s.Text
		f.send("response.output_text.delta", f.at(map[string]any{"delta": s.Text, "logprobs": []any{}}))
	}
}

func responsesCallID() string { return "call_" + core.RandomHex(8) }

func (f *responsesFormat) called(c toolCall, status string) responsesCall {
	return responsesCall{Arguments: c.Arguments, CallID: c.ID, Name: c.Name, Type: "function_call",
		ID: "fc_" + core.RandomHex(8), Status: status}
}

// callStep writes a token of a tool's call.
func (f *responsesFormat) callStep(s core.Step) {
	at := f.within.at
	opens, closes := f.within.take(s)
	if opens {
		c := f.called(toolCall{ID: responsesCallID(), Name: f.demand.tools[at]}, "in_progress")
		f.made = append(f.made, c)
		f.send("response.output_item.added", map[string]any{"output_index": at, "item": c})
	}
	if s.Text != "" {
		f.made[at].Arguments += s.Text
		f.send("response.function_call_arguments.delta", map[string]any{"output_index": at, "item_id": f.made[at].ID,
			"delta": s.Text})
	}
	if closes || s.Reason != "" && f.within.open {
		f.made[at].Status = "completed"
		f.send("response.function_call_arguments.done", map[string]any{"output_index": at, "item_id": f.made[at].ID,
			"name": f.made[at].Name, "arguments": f.made[at].Arguments})
		f.send("response.output_item.done", map[string]any{"output_index": at, "item": f.made[at]})
	}
}

func (f *responsesFormat) End(outs []*core.Outcome) {
	if f.demand.tools != nil {
		f.send("response.completed", map[string]any{"response": f.Whole(outs)})
		return
	}
	f.send("response.output_text.done", f.at(map[string]any{"text": f.text, "logprobs": []any{}}))
	f.send("response.content_part.done", f.at(map[string]any{"part": f.part(f.text)}))
	f.send("response.output_item.done", map[string]any{"output_index": 0, "item": f.item("completed", f.text)})
	f.send("response.completed", map[string]any{"response": f.Whole(outs)})
}
