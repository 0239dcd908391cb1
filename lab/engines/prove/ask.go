// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/lab/internal/apis"
)

// plain opens one connection for each request, so no request uses a connection that an engine or the gateway has just
// closed. A request that fails here has failed in the gateway.
var plain = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// question is one request of a client. It is greedy, so its text depends only on the prompt.
type question struct {
	name      string // "" is the API's
	api       *apis.API
	stream    bool
	prompt    string
	maxTokens int
	more      map[string]any // further members of the body, or others in place of the API's
}

// newQuestion makes a prompt of about so many tokens (the tiny model has one token for each byte) that no engine has
// seen. Its first bytes are random, so no prefix cache has even its first block.
func newQuestion(api *apis.API, stream bool, tokens, maxTokens int) question {
	filler := strings.Repeat(" keys and values of the prompt move from one engine to another", tokens/60+1)
	return question{api: api, stream: stream, prompt: (rand.Text() + filler)[:tokens], maxTokens: maxTokens}
}

// with gives the question a name and further members.
func (q question) with(name string, more map[string]any) question {
	q.name, q.more = name, more
	return q
}

func (q question) String() string {
	name := q.name
	if name == "" {
		name = q.api.Name
	}
	if q.stream {
		return name + ", streamed"
	}
	return name
}

func (q question) body() map[string]any {
	body := q.api.Body(q.prompt, q.maxTokens)
	body["model"] = "tiny"
	if q.stream {
		body["stream"] = true
		if q.api == apis.Completions || q.api == apis.Chat {
			body["stream_options"] = map[string]bool{"include_usage": true}
		}
	}
	maps.Copy(body, q.more)
	return body
}

// response is what the client got.
type response struct {
	*apis.Said
	status int    // 0: no response at all
	mode   string // X-PD-Mode
	took   time.Duration
}

func (a *response) String() string {
	switch {
	case a.status == 0:
		return fmt.Sprintf("no response after %.1f s: %v", a.took.Seconds(), a.Err)
	case a.Whole:
		return fmt.Sprintf("%d after %.1f s", a.status, a.took.Seconds())
	default:
		return fmt.Sprintf("%d, cut after %d characters and %.1f s", a.status, len(a.Text()), a.took.Seconds())
	}
}

// right reports whether the client got this text, whole.
func (a *response) right(text string) bool {
	return a.status == http.StatusOK && a.Whole && a.Err == nil && a.Text() == text
}

// differs says what is not as in one engine's response. The two computed on different batches, so their numbers may
// differ in the last digits.
func (a *response) differs(one *response) string {
	switch {
	case a.status != http.StatusOK || !a.Whole || a.Err != nil:
		return a.String()
	case len(one.Texts) == 0 || !maps.Equal(a.Texts, one.Texts):
		return "another text"
	case a.PromptTokens != one.PromptTokens:
		return fmt.Sprintf("%d prompt tokens in place of %d", a.PromptTokens, one.PromptTokens)
	case !maps.EqualFunc(a.Logprobs, one.Logprobs, func(a, b []float64) bool {
		return slices.EqualFunc(a, b, func(x, y float64) bool { return math.Abs(x-y) < 1e-3 })
	}):
		return "other log probabilities"
	}
	return ""
}

// startsLike reports whether the texts are beginnings of one engine's.
func (a *response) startsLike(one *response) bool {
	for i, text := range a.Texts {
		if !strings.HasPrefix(one.Texts[i], text) {
			return false
		}
	}
	return true
}

// ask sends the question to a gateway or an engine and reads the response to its end, for 90 seconds at most. onEvent,
// if not nil, is called for each event of a stream.
func ask(ctx context.Context, base string, q question, onEvent func()) *response {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	begin := time.Now()
	a := &response{Said: &apis.Said{}}
	got, err := post(ctx, base+q.api.Path, q.body())
	if err == nil {
		defer got.Body.Close()
		a.status, a.mode = got.StatusCode, got.Header.Get("X-Pd-Mode")
		streamed := q.stream && a.status == http.StatusOK
		a.Said = apis.Read(got.Body, streamed, onEvent)
		if streamed && a.Err == nil && !a.Whole {
			err = io.ErrUnexpectedEOF
		}
	}
	if err != nil {
		a.Err = err
	}
	a.took = time.Since(begin)
	return a
}

// post sends a body as JSON.
func post(ctx context.Context, url string, body any, header ...string) (*http.Response, error) {
	content, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	return plain.Do(request)
}

// get reads a page of at most 16 MB. Another status than 200 is an error.
func get(ctx context.Context, url string, limit time.Duration) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	got, err := plain.Do(request)
	if err != nil {
		return nil, err
	}
	defer got.Body.Close()
	if got.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s answered %s", request.URL.Path, got.Status)
	}
	return io.ReadAll(io.LimitReader(got.Body, 16<<20))
}

// salted makes the engine compute the whole prompt, even if it has done so before: it then ignores its prefix cache.
func (q question) salted() question {
	more := map[string]any{"cache_salt": rand.Text()}
	maps.Copy(more, q.more)
	q.more = more
	return q
}

// alone sends the question to one engine, which computes the whole prompt: every other way must give the same text.
// The APIs that know no salt have the same text as another one.
func alone(ctx context.Context, engine string, q question) (string, error) {
	q.stream = false
	switch q.api {
	case apis.Responses, apis.Messages:
		q.api = apis.Chat
	case apis.Generate:
		q.api = apis.Completions
	}
	a := ask(ctx, engine, q.salted(), nil)
	switch {
	case a.Err != nil:
		return "", fmt.Errorf("one engine alone: %w", a.Err)
	case a.status != http.StatusOK || a.Text() == "":
		return "", fmt.Errorf("one engine alone answered %d with %d characters", a.status, len(a.Text()))
	case a.CachedTokens != 0:
		return "", fmt.Errorf("one engine alone had %d tokens of the prompt already: no reference", a.CachedTokens)
	}
	return a.Text(), nil
}
