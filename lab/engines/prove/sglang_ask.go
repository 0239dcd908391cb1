// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"
)

// sglangRequest is a client's greedy request to SGLang.
type sglangRequest struct {
	name, path string
	body       map[string]any // without the model
	stream     bool
}

func (q sglangRequest) String() string {
	if q.stream {
		return q.name + ", streamed"
	}
	return q.name
}

// sglangOf is a request of one of the APIs that vLLM serves, too.
func sglangOf(api *api, stream bool, tokens, maxTokens int) sglangRequest {
	q := newQuestion(api, stream, tokens, maxTokens)
	return sglangRequest{name: api.name, path: api.path, body: api.body(q.prompt, maxTokens), stream: stream}
}

// sglangGenerate is a request of SGLang's own API. more are further members of its body.
func sglangGenerate(name string, stream bool, text any, maxTokens int, more map[string]any) sglangRequest {
	body := map[string]any{"text": text,
		"sampling_params": map[string]any{"max_new_tokens": maxTokens, "temperature": 0}}
	maps.Copy(body, more)
	return sglangRequest{name: name, path: "/generate", body: body, stream: stream}
}

// with adds members to the body.
func (q sglangRequest) with(name string, more map[string]any) sglangRequest {
	q.name, q.body = name, maps.Clone(q.body)
	maps.Copy(q.body, more)
	return q
}

func newPrompt(tokens int) string { return newQuestion(completions, false, tokens, 0).prompt }

// sglangRequests has each API, streamed and not, lists of prompts, and log probabilities.
func sglangRequests() []sglangRequest {
	two := func(a, b int) []string { return []string{newPrompt(a), newPrompt(b)} }
	fromStart := map[string]any{"return_logprob": true, "logprob_start_len": 0}
	list := map[string]any{"prompt": two(120, 60)}
	requests := []sglangRequest{
		sglangOf(completions, false, 300, 24), sglangOf(completions, true, 64, 24),
		sglangOf(chat, false, 31, 24), sglangOf(chat, true, 500, 24),
		sglangOf(responses, false, 100, 24), sglangOf(responses, true, 90, 24),
		sglangOf(messages, false, 101, 24), sglangOf(messages, true, 80, 24),
		sglangGenerate("generate", false, newPrompt(96), 24, nil),
		sglangGenerate("generate", true, newPrompt(97), 24, nil),
		sglangOf(completions, false, 1, 24).with("completions, two prompts", list),
		sglangOf(completions, true, 1, 24).with("completions, two prompts", map[string]any{"prompt": two(50, 200)}),
		sglangGenerate("generate, two prompts", false, two(70, 30), 24, nil),
		sglangGenerate("generate, two prompts", true, two(40, 90), 24, nil),
		sglangOf(completions, false, 70, 8).with("completions, logprobs", map[string]any{"logprobs": 2}),
		sglangOf(chat, true, 70, 8).with("chat, logprobs", map[string]any{"logprobs": true, "top_logprobs": 2}),
		sglangGenerate("generate, prompt's logprobs", false, newPrompt(60), 8, fromStart),
		sglangGenerate("generate, prompt's logprobs", true, newPrompt(61), 8, fromStart),
		sglangGenerate("generate, two prompts' logprobs", false, two(40, 20), 8, fromStart),
	}
	return requests
}

// sglangReply is what the client got. texts and logprobs are by the number of the prompt. The log probabilities are all
// numbers in them, of the prompt and of the text, token ids among them.
type sglangReply struct {
	status       int // 0: no response at all
	mode         string
	texts        map[int]string
	logprobs     map[int][]float64
	promptTokens int
	whole        bool
	took         time.Duration
	err          error
}

func (a *sglangReply) String() string {
	switch {
	case a.status == 0:
		return fmt.Sprintf("no response after %.1f s", a.took.Seconds())
	case a.whole:
		return fmt.Sprintf("%d after %.1f s", a.status, a.took.Seconds())
	default:
		return fmt.Sprintf("%d, cut after %.1f s", a.status, a.took.Seconds())
	}
}

// differs says what is not as in one engine's reply. The two computed on different batches, so their numbers may differ
// in the last digits.
func (a *sglangReply) differs(one *sglangReply) string {
	switch {
	case a.status != http.StatusOK || !a.whole || a.err != nil:
		return a.String()
	case len(one.texts) == 0 || !maps.Equal(a.texts, one.texts):
		return "another text"
	case a.promptTokens != one.promptTokens:
		return fmt.Sprintf("%d prompt tokens in place of %d", a.promptTokens, one.promptTokens)
	case !maps.EqualFunc(a.logprobs, one.logprobs, func(a, b []float64) bool {
		return slices.EqualFunc(a, b, func(x, y float64) bool { return math.Abs(x-y) < 1e-3 })
	}):
		return "other log probabilities"
	}
	return ""
}

// startsLike reports whether the texts are beginnings of one engine's.
func (a *sglangReply) startsLike(one *sglangReply) bool {
	for i, text := range a.texts {
		if !strings.HasPrefix(one.texts[i], text) {
			return false
		}
	}
	return true
}

// askSGLang sends a request and reads the response to its end. onEvent, if not nil, is called for each event of a
// stream.
func askSGLang(ctx context.Context, base string, q sglangRequest, onEvent func()) *sglangReply {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	begin := time.Now()
	a := &sglangReply{texts: map[int]string{}, logprobs: map[int][]float64{}}
	a.err = a.ask(ctx, base, q, onEvent)
	a.took = time.Since(begin)
	return a
}

func (a *sglangReply) ask(ctx context.Context, base string, q sglangRequest, onEvent func()) error {
	body := maps.Clone(q.body)
	body["model"] = "tiny"
	if q.stream {
		body["stream"] = true
		if q.path == completions.path || q.path == chat.path {
			body["stream_options"] = map[string]bool{"include_usage": true}
		}
	}
	content, err := json.Marshal(body)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, base+q.path, bytes.NewReader(content))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := plain.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	a.status, a.mode = response.StatusCode, response.Header.Get("X-Pd-Mode")
	if q.stream && a.status == http.StatusOK {
		return a.readStream(response.Body, onEvent)
	}
	content, err = io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	a.whole = json.Valid(content)
	return a.addAll(content)
}

func (a *sglangReply) readStream(body io.Reader, onEvent func()) error {
	scanner := bufio.NewScanner(body)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		data, found := strings.CutPrefix(scanner.Text(), "data: ")
		switch {
		case !found:
			continue
		case data == "[DONE]":
			a.whole = true
			continue
		}
		if err := a.addAll([]byte(data)); err != nil {
			return err
		}
		if onEvent != nil {
			onEvent()
		}
	}
	if err := scanner.Err(); err != nil || a.whole {
		return err
	}
	return io.ErrUnexpectedEOF
}

// sglangPiece is a response of any of the APIs, an element of a list of them, or an event.
type sglangPiece struct {
	Type    string // of an event of responses and messages
	Index   int
	Text    json.RawMessage // generate: the text so far; responses: settings
	Delta   json.RawMessage // responses: a string; messages: an object
	Meta    *sglangMeta     `json:"meta_info"` // generate
	Choices []struct {      // chat, completions
		Index          int
		Text           string
		Message, Delta struct{ Content string }
		Logprobs       json.RawMessage
	}
	Output            []struct{ Content []struct{ Text string } } // responses
	Content           []struct{ Text string }                     // messages
	Usage             *sglangUsage
	Response, Message *struct{ Usage *sglangUsage } // the events of responses and messages that have a usage
	Error             *struct{ Message string }
}

type sglangMeta struct {
	PromptTokens int             `json:"prompt_tokens"`
	Prompt       json.RawMessage `json:"input_token_logprobs"`
	Text         json.RawMessage `json:"output_token_logprobs"`
}

type sglangUsage struct {
	PromptTokens int `json:"prompt_tokens"`
	InputTokens  int `json:"input_tokens"` // the name in responses and messages
}

// addAll adds a response, a list of responses, or an event.
func (a *sglangReply) addAll(content []byte) error {
	if len(content) == 0 || content[0] != '[' {
		return a.add(content, -1)
	}
	var list []json.RawMessage
	if err := json.Unmarshal(content, &list); err != nil {
		return err
	}
	for i, element := range list {
		if err := a.add(element, i); err != nil {
			return err
		}
	}
	return nil
}

// add adds one. i is its place in a list, or -1.
func (a *sglangReply) add(content []byte, i int) error {
	var p sglangPiece
	if err := json.Unmarshal(content, &p); err != nil {
		return err
	}
	if p.Error != nil {
		return errors.New(p.Error.Message)
	}
	for _, choice := range p.Choices {
		a.texts[choice.Index] += choice.Text + choice.Message.Content + choice.Delta.Content
		a.logprobs[choice.Index] = append(a.logprobs[choice.Index], numbersIn(choice.Logprobs)...)
	}
	for _, output := range p.Output {
		p.Content = append(p.Content, output.Content...)
	}
	for _, content := range p.Content {
		a.texts[0] += content.Text
	}
	var text string
	switch {
	case p.Meta != nil:
		i = max(i, p.Index)
		if err := json.Unmarshal(p.Text, &text); err != nil {
			return err
		}
		if _, streamed := a.texts[i]; !streamed {
			a.promptTokens += p.Meta.PromptTokens
		}
		a.texts[i] = text
		a.logprobs[i] = append(numbersIn(p.Meta.Prompt), numbersIn(p.Meta.Text)...)
	case p.Type == "response.output_text.delta":
		if err := json.Unmarshal(p.Delta, &text); err != nil {
			return err
		}
		a.texts[0] += text
	case p.Type == "content_block_delta":
		var delta struct{ Text string }
		if err := json.Unmarshal(p.Delta, &delta); err != nil {
			return err
		}
		a.texts[0] += delta.Text
	case p.Type == "response.completed", p.Type == "response.incomplete", p.Type == "message_stop":
		a.whole = true
	}
	for _, holder := range []*struct{ Usage *sglangUsage }{p.Response, p.Message, {Usage: p.Usage}} {
		if holder != nil && holder.Usage != nil {
			a.promptTokens = max(a.promptTokens, holder.Usage.PromptTokens+holder.Usage.InputTokens)
		}
	}
	return nil
}

// numbersIn returns all numbers in a JSON value, in their order.
func numbersIn(raw json.RawMessage) (found []float64) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	for {
		token, err := decoder.Token()
		if err != nil {
			return found
		}
		if number, ok := token.(float64); ok {
			found = append(found, number)
		}
	}
}
