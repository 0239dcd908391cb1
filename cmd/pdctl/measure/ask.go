// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/tidwall/gjson"
)

// sample is what was measured of one request. Times count from the planned arrival.
type sample struct {
	target, round int
	at            time.Duration // the planned arrival, since the run began

	lag   time.Duration // until it was sent
	first time.Duration // until the first token
	last  time.Duration // until the last one
	total time.Duration // until the end of the response
	gaps  []time.Duration

	events       int // with content
	tokens       int // by usage; 0 if the server did not tell
	promptTokens int
	mode         string // X-PD-Mode
	fault        string // "" for a request that was served
}

// count is the number of tokens, as well as it is known.
func (s *sample) count() int {
	if s.tokens > 0 {
		return s.tokens
	}
	return s.events
}

// perToken is the mean time between two tokens; 0 if there was only one.
func (s *sample) perToken() time.Duration {
	if s.count() < 2 {
		return 0
	}
	return (s.last - s.first) / time.Duration(s.count()-1)
}

// Faults of requests that have no status of their own.
const (
	faultConnect = "no connection"
	faultTimeout = "timeout"
	faultBroken  = "broken stream"
	faultError   = "error in the stream"
	faultEnd     = "stream without an end"
	faultEmpty   = "no token"
	faultAbort   = "finish_reason abort" // vLLM's, of an engine that shuts down
)

// ask sends one request and reads the stream to its end.
func (r *run) ask(ctx context.Context, t Target, p Prompt, planned time.Time) (s sample) {
	body := maps.Clone(p.Body)
	body["model"], body["stream"] = t.Model, true
	body["stream_options"] = map[string]bool{"include_usage": true}
	text, err := json.Marshal(body)
	if err != nil {
		s.fault = "no JSON"
		return s
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, Address(t.URL, p.Path), bytes.NewReader(text))
	if err != nil {
		s.fault = "no URL"
		return s
	}
	maps.Copy(req.Header, r.Header)
	req.Header.Set("Content-Type", "application/json")
	s.lag = time.Since(planned)
	resp, err := r.client.Do(req)
	if err != nil {
		s.fault = faultConnect
		if dial, ok := errors.AsType[*net.OpError](err); ok && dial.Op == "dial" {
			s.fault += ": " + Reason(err)
		}
		var late interface{ Timeout() bool }
		if errors.As(err, &late) && late.Timeout() {
			s.fault = faultTimeout
		}
		return s
	}
	defer resp.Body.Close()
	s.mode = short(resp.Header.Get("X-PD-Mode"))
	if resp.StatusCode != http.StatusOK {
		refusal, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // a status without a code is enough
		word, _ := failure(refusal)
		s.fault = strings.TrimSpace(strconv.Itoa(resp.StatusCode) + " " + word)
		return s
	}
	s.fault = s.read(resp.Body, planned)
	s.total = time.Since(planned)
	return s
}

// Reason tells in a few words, without an address, why a server did not answer.
func Reason(err error) string {
	if name, ok := errors.AsType[*net.DNSError](err); ok {
		return name.Err
	}
	if number, ok := errors.AsType[syscall.Errno](err); ok {
		return number.Error()
	}
	var late interface{ Timeout() bool }
	if errors.As(err, &late) && late.Timeout() {
		return "timeout"
	}
	if of, ok := errors.AsType[*url.Error](err); ok {
		return of.Err.Error()
	}
	return err.Error()
}

// Address joins a base address, with or without /v1, and a path.
func Address(base, path string) string {
	return strings.TrimSuffix(strings.TrimRight(base, "/"), "/v1") + path
}

// read reads the events, and returns what went wrong.
func (s *sample) read(body io.Reader, planned time.Time) (fault string) {
	lines := bufio.NewScanner(body)
	lines.Buffer(make([]byte, 0, 4<<10), 8<<20)
	for lines.Scan() {
		now := time.Since(planned)
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !ok {
			continue
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			_, _ = io.Copy(io.Discard, body) // so that the connection can be used again
			if fault == "" && s.events == 0 {
				return faultEmpty
			}
			return fault
		}
		if word, failed := failure(data); failed {
			fault = strings.TrimSpace(faultError + " " + word)
			continue
		}
		event := gjson.ParseBytes(data)
		if n := event.Get("usage.completion_tokens").Int(); n > 0 {
			s.tokens, s.promptTokens = int(n), int(event.Get("usage.prompt_tokens").Int())
		}
		if event.Get("choices.0.finish_reason").Str == "abort" {
			fault = faultAbort
		}
		if !hasContent(event) {
			continue
		}
		if s.events++; s.events == 1 {
			s.first = now
		} else {
			s.gaps = append(s.gaps, now-s.last)
		}
		s.last = now
	}
	var late interface{ Timeout() bool }
	switch {
	case fault != "":
		return fault
	case errors.As(lines.Err(), &late) && late.Timeout():
		return faultTimeout
	case lines.Err() != nil:
		return faultBroken
	}
	return faultEnd
}

// hasContent reports whether an event has something of the answer: text, a thought or a tool call.
func hasContent(event gjson.Result) bool {
	for _, choice := range event.Get("choices").Array() {
		for _, path := range []string{"text", "delta.content", "delta.reasoning_content", "delta.reasoning"} {
			if choice.Get(path).Str != "" {
				return true
			}
		}
		if choice.Get("delta.tool_calls.0").Exists() {
			return true
		}
	}
	return false
}

// failure reports whether a body or event is an error object, and the name of the error if it has one.
func failure(body []byte) (name string, failed bool) {
	e := gjson.GetBytes(body, "error")
	if !e.Exists() || e.Type == gjson.Null {
		return "", false
	}
	for _, member := range []string{"code", "type"} {
		if v := e.Get(member); v.Type == gjson.String && short(v.Str) != "" {
			return v.Str, true
		}
	}
	return "", true
}

var identifier = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,40}$`)

// short keeps words from the network that are names, and drops all others: a message may repeat the prompt.
func short(word string) string {
	if identifier.MatchString(word) {
		return word
	}
	return ""
}
