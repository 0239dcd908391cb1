// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// responseTokens is the length of the responses, in tokens.
const responseTokens = 40

// request is a request of a client.
type request struct {
	what   string // for the reader
	prompt string
	path   string
	body   string
	stream bool
}

// message is a turn of a chat.
type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// body is a request's JSON: a completion has a prompt, a chat has messages.
type body struct {
	Model         string         `json:"model"`
	Prompt        string         `json:"prompt,omitempty"`
	Messages      []message      `json:"messages,omitempty"`
	MaxTokens     int            `json:"max_tokens"`
	Temperature   int            `json:"temperature"`
	Stream        bool           `json:"stream"`
	StreamOptions *streamOptions `json:"stream_options,omitempty"`
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"` // a last event with the token counts
}

func completion(prompt string, stream bool) request {
	return newRequest("completion", "/v1/completions", prompt, body{Prompt: prompt, Stream: stream})
}

func chat(prompt string, stream bool) request {
	return newRequest("chat", "/v1/chat/completions", prompt,
		body{Messages: []message{{"user", prompt}}, Stream: stream})
}

func newRequest(what, path, prompt string, b body) request {
	b.Model, b.MaxTokens = engine.Model, responseTokens
	if b.Stream {
		what += ", streamed"
		b.StreamOptions = &streamOptions{IncludeUsage: true}
	}
	raw, _ := json.Marshal(b) // strings, numbers and booleans: never fails
	return request{what, prompt, path, string(raw), b.Stream}
}

// response is what the client got.
type response struct {
	text   string
	prompt int // tokens of the prompt, as the engine counts them
	tokens int // tokens of the response
}

// event is one whole response, or one event of a stream, of completions (Text) or chat (Message, Delta).
type event struct {
	Choices []struct {
		Text           string
		Message, Delta struct{ Content string }
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
}

// ask sends a request as any OpenAI client would. It calls token with each piece of text that arrives.
func ask(ctx context.Context, url string, r request, token func(string)) (response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+r.path, strings.NewReader(r.body))
	if err != nil {
		return response{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return response{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
		return response{}, fmt.Errorf("the response is %s: %s", resp.Status, body)
	}
	var a response
	add := func(raw []byte) error {
		var e event
		if err := json.Unmarshal(raw, &e); err != nil {
			return fmt.Errorf("the response is not what OpenAI's API says: %w", err)
		}
		for _, c := range e.Choices {
			piece := c.Text + c.Message.Content + c.Delta.Content
			a.text += piece
			token(piece)
		}
		if e.Usage != nil {
			a.prompt, a.tokens = e.Usage.Prompt, e.Usage.Completion
		}
		return nil
	}
	if !r.stream {
		body, err := io.ReadAll(resp.Body)
		if err == nil {
			err = add(body)
		}
		return a, err
	}
	err = readEvents(resp.Body, add)
	return a, err
}

// readEvents reads server-sent events up to "[DONE]". A stream that ends before it was cut.
func readEvents(body io.Reader, add func([]byte) error) error {
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		switch {
		case !ok:
			continue
		case data == "[DONE]":
			return nil
		}
		if err := add([]byte(data)); err != nil {
			return err
		}
	}
	return errors.Join(errors.New("the stream broke off"), lines.Err())
}
