// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net/http"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/enginesim"
)

// body makes a completion with a prompt of its own. Pairs are further members; nil removes one.
func body(pairs ...any) string {
	return object(append([]any{"model", model, "prompt", prompt(200), "max_tokens", 8, "temperature", 0}, pairs...)...)
}

// chat makes a chat in the same way.
func chat(pairs ...any) string {
	messages := []map[string]string{{"role": "user", "content": prompt(200)}}
	return object(append([]any{"model", model, "messages", messages, "max_tokens", 8, "temperature", 0}, pairs...)...)
}

func object(pairs ...any) string {
	members := map[string]any{}
	for i := 0; i+1 < len(pairs); i += 2 {
		name, _ := pairs[i].(string)
		if members[name] = pairs[i+1]; pairs[i+1] == nil {
			delete(members, name)
		}
	}
	text, err := json.Marshal(members)
	if err != nil {
		panic(err) // a case's own mistake
	}
	return string(text)
}

// answer is a response, as far as it came.
type answer struct {
	status int
	header http.Header
	body   []byte
	err    error // the response never came, or broke off
}

func (s *Scene) send(ctx context.Context, path, content string, header ...string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.gateway.URL+path, strings.NewReader(content))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return s.client.Do(r)
}

// post sends a request and reads its whole response.
func (s *Scene) post(ctx context.Context, path, content string, header ...string) answer {
	resp, err := s.send(ctx, path, content, header...)
	if err != nil {
		return answer{err: err}
	}
	defer resp.Body.Close()
	a := answer{status: resp.StatusCode, header: resp.Header}
	a.body, a.err = io.ReadAll(resp.Body)
	return a
}

// right returns the text that one engine alone gives for a request.
func (s *Scene) right(ctx context.Context, path, content string) (string, error) {
	alone := &Scene{gateway: &Instance{URL: s.alone.URL()}, client: s.client}
	a := alone.post(ctx, path, content)
	if a.err != nil || a.status != http.StatusOK {
		return "", fmt.Errorf("the reference engine answers with status %d: %.200s", a.status, a.body)
	}
	return a.text(), nil
}

// whole is a breach if the answer is not a whole one with the right text.
func (s *Scene) whole(ctx context.Context, a answer, path, content string) error {
	want, err := s.right(ctx, path, content)
	if err != nil {
		return err
	}
	switch {
	case a.status != http.StatusOK || a.err != nil:
		return breach("a whole response with status 200", "%s", a)
	case a.streamed() && !a.done():
		return breach("a stream that ends with [DONE]", "a stream without it")
	case a.text() != want:
		return breach("the text that one engine alone gives", "another text (%d bytes, expected %d)", len(a.text()),
			len(want))
	}
	return nil
}

// String tells what came, without texts.
func (a answer) String() string {
	switch {
	case a.status == 0:
		return "no response: " + cause(a.err)
	case a.err != nil:
		return fmt.Sprintf("status %d, broken after %d bytes", a.status, len(a.body))
	case a.status >= http.StatusBadRequest:
		var e struct{ Error struct{ Message string } }
		if json.Unmarshal(a.body, &e) == nil && e.Error.Message != "" {
			return fmt.Sprintf("status %d (%.80s)", a.status, e.Error.Message)
		}
	case a.streamed():
		return fmt.Sprintf("status %d, a stream of %d events, [DONE]: %v", a.status, len(a.events()), a.done())
	}
	return fmt.Sprintf("status %d, %d bytes", a.status, len(a.body))
}

// cause leaves out addresses, which differ from run to run.
func cause(err error) string {
	switch {
	case err == nil:
		return "none"
	case errors.Is(err, context.DeadlineExceeded):
		return "time ran out"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "the connection was closed"
	}
	text := err.Error()
	return text[strings.LastIndex(text, ": ")+1:]
}

func (a answer) broken() bool { return a.err != nil }

// streamed reports whether the first line that is no comment is an event's.
func (a answer) streamed() bool {
	for line := range bytes.Lines(a.body) {
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != ':' {
			return bytes.HasPrefix(line, []byte("data:"))
		}
	}
	return false
}

// events are the data of a stream's events.
func (a answer) events() (all []string) {
	for line := range strings.Lines(string(a.body)) {
		if data, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "data:"); ok {
			all = append(all, strings.TrimSpace(data))
		}
	}
	return all
}

func (a answer) done() bool { return slices.Contains(a.events(), "[DONE]") }

// failedEvent reports whether an event of a stream tells of an error.
func (a answer) failedEvent() bool {
	return slices.ContainsFunc(a.events(), func(event string) bool {
		var e struct{ Error any }
		return json.Unmarshal([]byte(event), &e) == nil && e.Error != nil
	})
}

// chunk is what a response, or an event of a stream, says.
type chunk struct {
	Choices []struct {
		Text           string
		Message, Delta struct{ Content string }
	}
	Usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		Details          struct {
			Cached *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func (a answer) chunks() (all []chunk) {
	texts := a.events()
	if len(texts) == 0 {
		texts = []string{string(a.body)}
	}
	for _, text := range texts {
		var c chunk
		if json.Unmarshal([]byte(text), &c) == nil {
			all = append(all, c)
		}
	}
	return all
}

func (a answer) text() string {
	var b strings.Builder
	for _, c := range a.chunks() {
		for _, choice := range c.Choices {
			b.WriteString(choice.Text + choice.Message.Content + choice.Delta.Content)
		}
	}
	return b.String()
}

// stream is a response that is read event by event.
type stream struct {
	status int
	got    bytes.Buffer
	lines  *bufio.Reader
	leave  context.CancelFunc // breaks the connection, as a client that leaves does
}

func (s *Scene) open(ctx context.Context, path, content string) (*stream, error) {
	ctx, leave := context.WithCancel(ctx)
	resp, err := s.send(ctx, path, content) //nolint:bodyclose // leave closes it
	if err != nil {
		leave()
		return nil, breach("a stream", "no response: %s", cause(err))
	}
	return &stream{status: resp.StatusCode, lines: bufio.NewReader(resp.Body), leave: func() {
		leave()
		_ = resp.Body.Close()
	}}, nil
}

// begun opens a stream, and reads its first chunks.
func (s *Scene) begun(ctx context.Context, content string, chunks int) (*stream, error) {
	t, err := s.open(ctx, completions, content)
	if err != nil {
		return nil, err
	}
	if err := t.next(chunks); err != nil {
		t.leave()
		return nil, breach("chunks", "%s", cause(err))
	}
	return t, nil
}

// next reads so many events with data.
func (t *stream) next(events int) error {
	for events > 0 {
		line, err := t.lines.ReadBytes('\n')
		t.got.Write(line)
		if err != nil {
			return err
		}
		if bytes.HasPrefix(line, []byte("data:")) {
			events--
		}
	}
	return nil
}

// end reads the rest and returns all of the response.
func (t *stream) end() answer {
	defer t.leave()
	_, err := t.got.ReadFrom(t.lines)
	return answer{status: t.status, body: t.got.Bytes(), err: err}
}

// leg is a request that an engine received.
type leg struct {
	enginesim.Request
	members map[string]any // numbers are json.Number
}

// legs returns what a side of the engines has received since the case began.
func (s *Scene) legs(engines []*enginesim.Engine) (all []leg) {
	for _, e := range engines {
		for _, r := range e.Requests()[s.requests[e]:] {
			all = append(all, leg{r, members(r.Body)})
		}
	}
	return all
}

func members(body []byte) map[string]any {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	m := map[string]any{}
	_ = d.Decode(&m) // no object has no members
	return m
}

// pair returns the two legs of a request that must have had just these.
func (s *Scene) pair() (p, d leg, err error) {
	ps, ds := s.legs(s.P), s.legs(s.D)
	if len(ps) != 1 || len(ds) != 1 {
		return p, d, breach("one prefill and one decode leg", "%d and %d", len(ps), len(ds))
	}
	return ps[0], ds[0], nil
}

// ask sends a request that must succeed, and returns its legs.
func (s *Scene) ask(ctx context.Context, path, content string, header ...string) (a answer, p, d leg, err error) {
	a = s.post(ctx, path, content, header...)
	if err = s.whole(ctx, a, path, content); err == nil {
		p, d, err = s.pair()
	}
	return a, p, d, err
}

// same reports whether two values of JSON mean the same. Numbers are compared exactly.
func same(a, b any) bool {
	switch x := a.(type) {
	case json.Number:
		y, ok := b.(json.Number)
		if !ok {
			return false
		}
		l, okL := new(big.Rat).SetString(x.String())
		r, okR := new(big.Rat).SetString(y.String())
		return okL && okR && l.Cmp(r) == 0
	case []any:
		y, ok := b.([]any)
		return ok && slices.EqualFunc(x, y, same)
	case map[string]any:
		y, ok := b.(map[string]any)
		return ok && maps.EqualFunc(x, y, same)
	}
	return a == b
}

func number(v any) string {
	n, _ := v.(json.Number)
	return n.String()
}
