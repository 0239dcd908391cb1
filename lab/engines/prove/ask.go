// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// plain opens one connection for each request, so no request uses a connection that an engine or the gateway has just
// closed. A request that fails here has failed in the gateway.
var plain = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// question is one request of a client. It is greedy, so its text depends only on the prompt.
type question struct {
	api       *api
	stream    bool // of chat and completions
	prompt    string
	maxTokens int
}

// newQuestion makes a prompt of about so many tokens (the tiny model has one token for each byte) that no engine has
// seen. Its first bytes are random, so no prefix cache has even its first block.
func newQuestion(api *api, stream bool, tokens, maxTokens int) question {
	filler := strings.Repeat(" keys and values of the prompt move from one engine to another", tokens/60+1)
	return question{api: api, stream: stream, prompt: (rand.Text() + filler)[:tokens], maxTokens: maxTokens}
}

func (q question) String() string {
	if q.stream {
		return q.api.name + ", streamed"
	}
	return q.api.name
}

// response is what the client got.
type response struct {
	status       int    // 0: no response at all
	mode         string // X-PD-Mode
	text         string // what the client read of it, if it was cut
	whole        bool   // it ended properly
	promptTokens int
	cachedTokens int // prompt tokens that the engine reports as cached; only without stream
	took         time.Duration
	err          error // why it is not whole
}

func (a *response) String() string {
	switch {
	case a.status == 0:
		return fmt.Sprintf("no response after %.1f s: %v", a.took.Seconds(), a.err)
	case a.whole:
		return fmt.Sprintf("%d after %.1f s", a.status, a.took.Seconds())
	default:
		return fmt.Sprintf("%d, cut after %d characters and %.1f s", a.status, len(a.text), a.took.Seconds())
	}
}

// ask sends the question to a gateway or an engine and reads the response to its end. A salt, if not empty, makes the
// engine ignore its prefix cache for the request. onText, if not nil, is called when streamed text arrives.
func ask(ctx context.Context, base string, q question, salt string, onText func()) *response {
	begin := time.Now()
	a := send(ctx, base, q, salt, onText)
	a.took = time.Since(begin)
	return a
}

func send(ctx context.Context, base string, q question, salt string, onText func()) *response {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	body := q.api.body(q.prompt, q.maxTokens)
	body["model"] = "tiny"
	if q.stream {
		body["stream"], body["stream_options"] = true, map[string]bool{"include_usage": true}
	}
	if salt != "" {
		body["cache_salt"] = salt
	}
	content, err := json.Marshal(body)
	if err != nil {
		return &response{err: err}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, base+q.api.path, bytes.NewReader(content))
	if err != nil {
		return &response{err: err}
	}
	request.Header.Set("Content-Type", "application/json")
	got, err := plain.Do(request)
	if err != nil {
		return &response{err: err}
	}
	defer got.Body.Close()
	a := &response{status: got.StatusCode, mode: got.Header.Get("X-Pd-Mode")}
	if q.stream && a.status == http.StatusOK {
		a.readStream(got.Body, onText)
	} else {
		a.readObject(got.Body)
	}
	return a
}

func (a *response) add(content []byte) {
	var p piece
	if a.err = json.Unmarshal(content, &p); a.err != nil {
		return
	}
	if p.Error != nil {
		a.err = fmt.Errorf("error: %s", p.Error.Message)
		return
	}
	a.text += p.text()
	if p.Usage != nil {
		a.promptTokens = p.Usage.PromptTokens + p.Usage.InputTokens + p.Usage.Created + p.Usage.Read
		a.cachedTokens = p.Usage.Details.CachedTokens
	}
}

func (a *response) readObject(body io.Reader) {
	content, err := io.ReadAll(body)
	if err != nil {
		a.err = err
		return
	}
	a.add(content)
	a.whole = json.Valid(content)
}

func (a *response) readStream(body io.Reader, onText func()) {
	scanner := bufio.NewScanner(body)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() && a.err == nil {
		data, found := strings.CutPrefix(scanner.Text(), "data: ")
		switch {
		case !found:
		case data == "[DONE]":
			a.whole = true
		default:
			a.add([]byte(data))
			if onText != nil {
				onText()
			}
		}
	}
	if a.err == nil {
		a.err = scanner.Err()
	}
	if a.err == nil && !a.whole {
		a.err = io.ErrUnexpectedEOF
	}
}

// alone sends the question to one engine: every other way must give the same text. The salt makes the engine compute
// the whole prompt, even if it has done so before.
func alone(ctx context.Context, engine string, q question) (string, error) {
	q.stream = false
	if q.api.plain != nil {
		q.api = q.api.plain
	}
	a := ask(ctx, engine, q, rand.Text(), nil)
	switch {
	case a.err != nil:
		return "", fmt.Errorf("one engine alone: %w", a.err)
	case a.status != http.StatusOK || a.text == "":
		return "", fmt.Errorf("one engine alone answered %d with %d characters", a.status, len(a.text))
	case a.cachedTokens != 0:
		return "", fmt.Errorf("one engine alone had %d tokens of the prompt already: no reference", a.cachedTokens)
	}
	return a.text, nil
}
