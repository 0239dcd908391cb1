// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidwall/gjson"
)

// request is one request of a client.
type request struct {
	model  *model
	path   string
	stream bool
	body   string
	opened func() // called with the response's first byte, unless it is nil
}

var prompts atomic.Uint64

// newRequest makes a request with a prompt that no engine has seen.
func newRequest(m *model, r *rand.Rand, promptBytes, tokens int) request {
	q := request{model: m, path: m.paths[r.IntN(len(m.paths))], stream: r.IntN(2) == 0}
	q.write(promptBytes, tokens)
	return q
}

// write writes the body, with a prompt of so many bytes and a response of so many tokens.
func (q *request) write(promptBytes, tokens int) {
	head := fmt.Sprintf("%d: ", prompts.Add(1))
	filler := strings.Repeat("the crane stands at the east pier. ", promptBytes/35+1)
	prompt := head + filler[:max(0, promptBytes-len(head))]
	message := fmt.Sprintf(`"messages":[{"role":"user","content":%q}],"max_tokens":%d`, prompt, tokens)
	var members string
	switch q.path {
	case pathCompletions:
		members = fmt.Sprintf(`"prompt":%q,"max_tokens":%d`, prompt, tokens)
	case pathChat, pathMessages:
		members = message
	case pathResponses:
		members = fmt.Sprintf(`"input":%q,"max_output_tokens":%d`, prompt, tokens)
	case pathSGLang:
		q.body = fmt.Sprintf(`{"text":%q,"sampling_params":{"max_new_tokens":%d,"temperature":0},"stream":%t}`, prompt,
			tokens, q.stream)
		if q.model != nil {
			q.body = fmt.Sprintf(`{"model":%q,`, q.model.name) + q.body[1:]
		}
		return
	case pathGenerate:
		ids := make([]int, len(prompt))
		for i := range ids {
			ids[i] = int(prompt[i])
		}
		list, _ := json.Marshal(ids) // numbers always can be
		members = fmt.Sprintf(`"token_ids":%s,"sampling_params":{"max_tokens":%d,"temperature":0}`, list, tokens)
	}
	temperature := `"temperature":0,`
	if q.path == pathGenerate {
		temperature = ""
	}
	q.body = fmt.Sprintf(`{"model":%q,%s%s}`, q.model.name, temperature,
		fmt.Sprintf(`"stream":%t,`, q.stream)+members)
}

// Verdicts on a response.
const (
	right     = "right"
	refused   = "refused" // an error response, with its status and code
	cutAloud  = "cut, and the client was told"
	cutAsDone = "cut by an engine that calls it complete" // see judge
	left      = "the client left"
	wrong     = "wrong"
	cutSilent = "silently cut"
	hung      = "hung"
	lost      = "lost"
)

// tally counts the verdicts of one order. Safe for concurrent use.
type tally struct {
	mu       sync.Mutex
	verdicts map[string]int
	codes    map[string]int // of refused requests
	shown    int
}

func newTally() *tally { return &tally{verdicts: map[string]int{}, codes: map[string]int{}} }

// add counts a verdict. The first ones that must not be are shown with their reasons.
func (t *tally) add(q request, verdict, why string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.verdicts[verdict]++
	if verdict == refused {
		code, message, _ := strings.Cut(why, "\n")
		t.codes[code]++
		if strings.HasPrefix(code, "4") && t.shown < 10 { // no fault is the client's
			t.shown++
			_, _ = fmt.Fprintf(os.Stderr, "%s %s, stream %t: %s: %s\n", q.model.name, q.path, q.stream, code, message)
		}
		return
	}
	if bad(verdict) && t.shown < 10 {
		t.shown++
		_, _ = fmt.Fprintf(os.Stderr, "%s %s %s, stream %t: %s\n", q.model.name, verdict, q.path, q.stream, why)
	}
}

// bad are verdicts that no fault of an engine or of the network excuses.
func bad(verdict string) bool {
	return verdict == wrong || verdict == cutSilent || verdict == hung || verdict == lost
}

func (t *tally) count(verdict string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.verdicts[verdict]
}

func (t *tally) all() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, v := range t.verdicts {
		n += v
	}
	return n
}

// send sends a request through the gateway and judges the response by that of the lone engine. A client with leave
// above 0 leaves after that time.
func (f *fleet) send(ctx context.Context, q request, leave time.Duration, t *tally) string {
	limit := f.patience
	if leave > 0 {
		limit = leave
	}
	begun := time.Now()
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	status, body, headers, err := f.post(rctx, f.url, q)
	var verdict, why string
	switch {
	case err != nil && rctx.Err() != nil && leave > 0:
		verdict = left
	case err != nil && rctx.Err() != nil:
		verdict, why = hung, fmt.Sprintf("after %s: status %d, %d bytes", f.patience, status, len(body))
	case err != nil && !headers:
		verdict, why = lost, err.Error()
	case err != nil:
		verdict, why = cutAloud, err.Error()
	case status != http.StatusOK:
		verdict, why = judgeError(status, body)
	default:
		verdict, why = f.judge(ctx, q, body)
		if verdict == cutSilent && q.model.terminated.Load() > begun.UnixNano() &&
			(q.path == pathResponses || q.path == pathMessages) {
			// On SIGTERM vLLM aborts its requests. These two APIs of it have no word for that: the response is whole,
			// and says that it is complete (entrypoints/openai/responses/serving.py of 0.32.0).
			verdict = cutAsDone
		}
	}
	t.add(q, verdict, why)
	return verdict
}

func (f *fleet) post(ctx context.Context, base string, q request) (status int, body string, headers bool, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, base+q.path, strings.NewReader(q.body))
	if err != nil {
		return 0, "", false, err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := f.client.Do(r)
	if err != nil {
		return 0, "", false, err
	}
	defer resp.Body.Close()
	var text bytes.Buffer
	if q.opened != nil {
		_, err = io.CopyN(&text, resp.Body, 1)
		q.opened()
	}
	if err == nil {
		_, err = text.ReadFrom(resp.Body)
	}
	return resp.StatusCode, text.String(), true, err
}

// judgeError judges an error response: it has an error object, which names no engine.
func judgeError(status int, body string) (verdict, why string) {
	e := gjson.Get(body, "error")
	if !e.IsObject() || e.Get("message").String() == "" {
		return wrong, fmt.Sprintf("status %d without an error object: %.200s", status, body)
	}
	if strings.Contains(body, wirePrefix) || strings.Contains(body, "127.77.") {
		return wrong, fmt.Sprintf("status %d names an engine: %.200s", status, body)
	}
	code := e.Get("code").String()
	if code == "" || code == strconv.Itoa(status) {
		code = e.Get("type").String()
	}
	return refused, fmt.Sprintf("%d %s\n%s", status, code, e.Get("message"))
}

// judge compares a response with status 200 with that of the lone engine.
func (f *fleet) judge(ctx context.Context, q request, body string) (verdict, why string) {
	got := read(q.path, body, q.stream)
	if got.failed {
		return cutAloud, "an error event"
	}
	q.opened = nil
	status, text, _, err := f.post(context.WithoutCancel(ctx), q.model.lone.URL(), q)
	if err != nil || status != http.StatusOK {
		return wrong, fmt.Sprintf("the lone engine answers %d, %v: %.200s", status, err, text)
	}
	want := read(q.path, text, q.stream)
	switch {
	case want.text == "" || !want.whole:
		return wrong, fmt.Sprintf("the lone engine's response has no text: %.300s", text)
	case !got.whole:
		return cutSilent, fmt.Sprintf("%d of %d events: %.300s", got.events, want.events, body[max(0, len(body)-300):])
	case got.text == want.text && got.end == want.end:
		return right, ""
	case strings.Contains(got.end, "abort") && strings.HasPrefix(want.text, got.text):
		return cutAloud, "finish reason abort"
	case len(got.text) < len(want.text) && strings.HasPrefix(want.text, got.text):
		return cutSilent, fmt.Sprintf("%d of %d bytes of text, end %q", len(got.text), len(want.text), got.end)
	}
	return wrong, fmt.Sprintf("text %.40q, end %q in place of %.40q, end %q", got.text, got.end, want.text, want.end)
}
