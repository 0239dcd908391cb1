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

	"github.com/pdkit/pdkit/lab/internal/apis"
)

// request is one request of a client.
type request struct {
	model  *model
	api    *apis.API
	stream bool
	body   []byte
	opened func() // called with the response's first byte, unless it is nil
}

var prompts atomic.Uint64

// newRequest makes a request with a prompt that no engine has seen.
func newRequest(m *model, r *rand.Rand, promptBytes, tokens int) request {
	q := request{model: m, api: m.apis[r.IntN(len(m.apis))], stream: r.IntN(2) == 0}
	q.write(promptBytes, tokens)
	return q
}

// write writes the body, with a prompt of so many bytes and a response of so many tokens.
func (q *request) write(promptBytes, tokens int) {
	head := fmt.Sprintf("%d: ", prompts.Add(1))
	filler := strings.Repeat("the crane stands at the east pier. ", promptBytes/35+1)
	body := q.api.Body(head+filler[:max(0, promptBytes-len(head))], tokens)
	body["model"], body["stream"] = q.model.name, q.stream
	q.body, _ = json.Marshal(body) // strings, numbers and booleans always can be
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

// tallies are those of all orders.
type tallies map[string]*tally

func newTallies(f *fleet) tallies {
	t := tallies{}
	for _, m := range f.models {
		t[m.name] = newTally()
	}
	return t
}

// errs are the verdicts that must not be.
func (t tallies) errs(f *fleet) (errs []error) {
	for _, m := range f.models {
		for _, verdict := range []string{wrong, cutSilent, hung, lost} {
			if n := t[m.name].count(verdict); n > 0 {
				errs = append(errs, fmt.Errorf("%s: %d %s", m.name, n, verdict))
			}
		}
	}
	return errs
}

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
			_, _ = fmt.Fprintf(os.Stderr, "%s %s, stream %t: %s: %s\n", q.model.name, q.api.Path, q.stream, code,
				message)
		}
		return
	}
	if bad(verdict) && t.shown < 10 {
		t.shown++
		_, _ = fmt.Fprintf(os.Stderr, "%s %s %s, stream %t: %s\n", q.model.name, verdict, q.api.Path, q.stream, why)
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
			(q.api == apis.Responses || q.api == apis.Messages) {
			// On SIGTERM vLLM aborts its requests. These two APIs of it have no word for that: the response is whole,
			// and says that it is complete (entrypoints/openai/responses/serving.py of 0.32.0).
			verdict = cutAsDone
		}
	}
	t.add(q, verdict, why)
	return verdict
}

func (f *fleet) post(ctx context.Context, base string, q request) (status int, body string, headers bool, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, base+q.api.Path, bytes.NewReader(q.body))
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
	got := apis.Read(strings.NewReader(body), q.stream, nil)
	if got.Failed && q.stream {
		return cutAloud, "an error event"
	}
	q.opened = nil
	status, text, _, err := f.post(context.WithoutCancel(ctx), q.model.lone.URL(), q)
	if err != nil || status != http.StatusOK {
		return wrong, fmt.Sprintf("the lone engine answers %d, %v: %.200s", status, err, text)
	}
	want := apis.Read(strings.NewReader(text), q.stream, nil)
	switch {
	case want.Text() == "" || !want.Whole:
		return wrong, fmt.Sprintf("the lone engine's response has no text: %.300s", text)
	case !got.Whole:
		return cutSilent, fmt.Sprintf("%d of %d events: %.300s", got.Events, want.Events, body[max(0, len(body)-300):])
	case got.Text() == want.Text() && got.End == want.End && !got.Failed:
		return right, ""
	case strings.Contains(got.End, "abort") && strings.HasPrefix(want.Text(), got.Text()):
		return cutAloud, "finish reason abort"
	case len(got.Text()) < len(want.Text()) && strings.HasPrefix(want.Text(), got.Text()):
		return cutSilent, fmt.Sprintf("%d of %d bytes of text, end %q", len(got.Text()), len(want.Text()), got.End)
	}
	return wrong, fmt.Sprintf("text %.40q, end %q in place of %.40q, end %q", got.Text(), got.End, want.Text(),
		want.End)
}
