// SPDX-License-Identifier: Apache-2.0

// Program openai-go asks with OpenAI's library for Go: a question a line, an answer a line, as the README.md of
// lab/clients says.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

type question struct {
	URL, API, Model string
	Prompt          json.RawMessage // text, or many
	Limit, N        int64
	Stream          bool
	Tools           []struct {
		Name       string
		Parameters map[string]any
	}
	Schema  map[string]any
	Leave   int
	Timeout float64 // seconds
}

type call struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

type failure struct {
	Class   string `json:"class"`
	Status  int    `json:"status"`
	Message string `json:"message"`
}

type answer struct {
	Texts  []string `json:"texts"`
	Finish []string `json:"finish"`
	Calls  []call   `json:"calls"`
	Usage  []int64  `json:"usage"`
	Error  *failure `json:"error"`
}

func (a *answer) text(index int64, text, finish string) {
	for int64(len(a.Texts)) <= index {
		a.Texts, a.Finish = append(a.Texts, ""), append(a.Finish, "")
	}
	a.Texts[index] += text
	if finish != "" {
		a.Finish[index] = finish
	}
}

func (a *answer) call(index int64, name, arguments string) {
	for int64(len(a.Calls)) <= index {
		a.Calls = append(a.Calls, call{Name: name})
	}
	a.Calls[index].Arguments += arguments
}

// text is the prompt of an API that takes one.
func (q *question) text() (s string) {
	_ = json.Unmarshal(q.Prompt, &s)
	return s
}

// events goes through a stream, and leaves it after so many events.
func events[T any](q *question, s *ssestream.Stream[T], each func(T)) error {
	defer s.Close()
	for i := 0; s.Next(); i++ {
		if q.Leave > 0 && i == q.Leave {
			return nil
		}
		each(s.Current())
	}
	return s.Err()
}

func completions(ctx context.Context, client *openai.Client, q *question, a *answer) error {
	var prompts []string
	p := openai.CompletionNewParams{Model: openai.CompletionNewParamsModel(q.Model), MaxTokens: openai.Int(q.Limit),
		N: openai.Int(q.N)}
	if json.Unmarshal(q.Prompt, &prompts) == nil {
		p.Prompt.OfArrayOfStrings = prompts
	} else {
		p.Prompt.OfString = openai.String(q.text())
	}
	take := func(c openai.Completion) {
		for _, choice := range c.Choices {
			a.text(choice.Index, choice.Text, string(choice.FinishReason))
		}
		if c.JSON.Usage.Valid() {
			a.Usage = []int64{c.Usage.PromptTokens, c.Usage.CompletionTokens}
		}
	}
	if q.Stream {
		p.StreamOptions.IncludeUsage = openai.Bool(true)
		return events(q, client.Completions.NewStreaming(ctx, p), take)
	}
	c, err := client.Completions.New(ctx, p)
	if err == nil {
		take(*c)
	}
	return err
}

func chat(ctx context.Context, client *openai.Client, q *question, a *answer) error {
	p := openai.ChatCompletionNewParams{Model: q.Model, MaxTokens: openai.Int(q.Limit), N: openai.Int(q.N),
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(q.text())}}
	for _, t := range q.Tools {
		p.ToolChoice.OfAuto = openai.String("required")
		p.Tools = append(p.Tools, openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{Name: t.Name,
			Parameters: t.Parameters}))
	}
	if q.Schema != nil {
		p.ResponseFormat.OfJSONSchema = &shared.ResponseFormatJSONSchemaParam{
			JSONSchema: shared.ResponseFormatJSONSchemaJSONSchemaParam{Name: "answer", Schema: q.Schema}}
	}
	if q.Stream {
		p.StreamOptions.IncludeUsage = openai.Bool(true)
		return events(q, client.Chat.Completions.NewStreaming(ctx, p), func(c openai.ChatCompletionChunk) {
			for _, choice := range c.Choices {
				a.text(choice.Index, choice.Delta.Content, choice.FinishReason)
				for _, t := range choice.Delta.ToolCalls {
					a.call(t.Index, t.Function.Name, t.Function.Arguments)
				}
			}
			if c.JSON.Usage.Valid() {
				a.Usage = []int64{c.Usage.PromptTokens, c.Usage.CompletionTokens}
			}
		})
	}
	c, err := client.Chat.Completions.New(ctx, p)
	if err != nil {
		return err
	}
	for _, choice := range c.Choices {
		a.text(choice.Index, choice.Message.Content, choice.FinishReason)
		for i, t := range choice.Message.ToolCalls {
			a.call(int64(i), t.Function.Name, t.Function.Arguments)
		}
	}
	a.Usage = []int64{c.Usage.PromptTokens, c.Usage.CompletionTokens}
	return nil
}

func response(ctx context.Context, client *openai.Client, q *question, a *answer) error {
	p := responses.ResponseNewParams{Model: q.Model, MaxOutputTokens: openai.Int(q.Limit),
		Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(q.text())}}
	for _, t := range q.Tools {
		p.ToolChoice.OfToolChoiceMode = param.NewOpt(responses.ToolChoiceOptionsRequired)
		p.Tools = append(p.Tools, responses.ToolParamOfFunction(t.Name, t.Parameters, true))
	}
	if q.Schema != nil {
		p.Text.Format = responses.ResponseFormatTextConfigParamOfJSONSchema("answer", q.Schema)
	}
	var whole responses.Response
	if q.Stream {
		text := ""
		err := events(q, client.Responses.NewStreaming(ctx, p), func(e responses.ResponseStreamEventUnion) {
			switch e.Type {
			case "response.output_text.delta":
				text += e.Delta
			case "response.completed":
				whole = e.Response
			}
		})
		if err != nil || q.Leave > 0 {
			return err
		}
		if text != whole.OutputText() {
			return errors.New("the pieces are not the whole")
		}
	} else {
		r, err := client.Responses.New(ctx, p)
		if err != nil {
			return err
		}
		whole = *r
	}
	a.text(0, whole.OutputText(), string(whole.Status))
	for i, item := range whole.Output {
		if item.Type == "function_call" {
			c := item.AsFunctionCall()
			a.call(int64(i), c.Name, c.Arguments)
		}
	}
	a.Usage = []int64{whole.Usage.InputTokens, whole.Usage.OutputTokens}
	return nil
}

func main() {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var q question
		if in.Decode(&q) != nil {
			return
		}
		client := openai.NewClient(option.WithBaseURL(q.URL+"/v1"), option.WithAPIKey("secret"),
			option.WithMaxRetries(0))
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(q.Timeout*float64(time.Second)))
		a := &answer{}
		apis := map[string]func(context.Context, *openai.Client, *question, *answer) error{
			"completions": completions, "chat": chat, "responses": response}
		if err := apis[q.API](ctx, &client, &q, a); err != nil {
			a.Error = &failure{Class: fmt.Sprintf("%T", err), Message: err.Error()}
			var refused *openai.Error
			if errors.As(err, &refused) {
				a.Error.Class, a.Error.Status = "openai.Error", refused.StatusCode
			}
			for name, kind := range map[string]error{"context.DeadlineExceeded": context.DeadlineExceeded,
				"io.ErrUnexpectedEOF": io.ErrUnexpectedEOF} {
				if errors.Is(err, kind) {
					a.Error.Class = name
				}
			}
		}
		cancel()
		if out.Encode(a) != nil {
			return
		}
	}
}
