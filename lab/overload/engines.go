// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// pair is a model of two engines, and the round tripper that reaches them. P computes one prompt after the other, in
// the order of arrival, or some of them at a time. As real engines do, it drops requests whose client has left, and
// what it has computed for them is lost. D gives each of its slots to one request for a fixed time; the others wait.
type pair struct {
	prefill time.Duration // for one prompt
	differ  bool          // prompts do
	prompts atomic.Int64
	slower  atomic.Int64  // prompts take so many times as long as at first; 0: as long
	decode  time.Duration // for one response

	// What is free, with the time since when it is: P's turns, and D's slots. An engine on a busy machine that wakes up
	// late does not serve less for it, since its work begins when it could have begun.
	turns, slots chan time.Time
}

// narrow says what bounds the rate at which a pair serves.
type narrow string

const (
	narrowPrefill narrow = "prefill" // P's time for a prompt, which is always the same
	narrowPrompts narrow = "prompts" // the same time on average: a few long prompts among short ones
	narrowBatch   narrow = "batch"   // P's time for a prompt, which is long, while it computes 16 of them at a time
	narrowDecode  narrow = "decode"  // D's slots
)

const batch = 16

// newPair makes engines that together serve rate requests a second.
func newPair(rate float64, decode time.Duration, by narrow) *pair {
	slots, prefill := rate*decode.Seconds(), float64(time.Second)/rate
	turns := 1
	switch by {
	case narrowDecode:
		prefill /= 1.5
	case narrowBatch:
		turns, prefill = batch, prefill*batch
		fallthrough
	default:
		slots *= 1.5
	}
	p := &pair{prefill: time.Duration(prefill), differ: by == narrowPrompts, decode: decode,
		turns: make(chan time.Time, turns), slots: make(chan time.Time, int(slots))}
	for _, free := range []chan time.Time{p.turns, p.slots} {
		for range cap(free) {
			free <- time.Time{}
		}
	}
	return p
}

// prompt is P's time for one prompt. Where prompts differ, one in ten takes seven times as long as the others.
func (p *pair) prompt() time.Duration {
	took := p.prefill * time.Duration(max(1, p.slower.Load()))
	switch {
	case !p.differ:
		return took
	case p.prompts.Add(1)%10 == 0:
		return took * 70 / 16
	}
	return took * 10 / 16
}

const (
	prefillHost = "prefill"
	decodeHost  = "decode"
)

// endpoints are the engines' entries, at these hosts.
func endpoints(prefill, decode string) (list []discovery.Endpoint) {
	for host, role := range map[string]discovery.Role{prefill: discovery.RolePrefill, decode: discovery.RoleDecode} {
		list = append(list, discovery.Endpoint{ID: host, URL: &url.URL{Scheme: "http", Host: host}, Role: role})
	}
	return list
}

// engine serves one of the two over HTTP.
func (p *pair) engine(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.URL.Host = name
		resp, err := p.RoundTrip(r)
		if err != nil {
			return // the gateway has left
		}
		defer resp.Body.Close()
		w.Header()["Content-Type"] = resp.Header["Content-Type"]
		b := make([]byte, 4096)
		for err == nil {
			var n int
			n, err = resp.Body.Read(b)
			_, _ = w.Write(b[:n])
			_ = http.NewResponseController(w).Flush()
		}
	})
}

// RoundTrip sends a leg to its engine.
func (p *pair) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_, _ = io.Copy(io.Discard, r.Body)
		_ = r.Body.Close()
	}
	if r.URL.Host == decodeHost {
		return p.serveDecode(r)
	}
	begin, err := hold(r.Context(), p.turns)
	if err != nil {
		return nil, err
	}
	end := begin.Add(p.prompt())
	if err := sleepUntil(r.Context(), end); err != nil {
		p.turns <- time.Now()
		return nil, err
	}
	p.turns <- end
	return respond(r, "application/json", io.NopCloser(strings.NewReader(`{"choices":[{"text":"a"}]}`))), nil
}

func (p *pair) serveDecode(r *http.Request) (*http.Response, error) {
	begin, err := hold(r.Context(), p.slots)
	if err != nil {
		return nil, err
	}
	s := &stream{ctx: r.Context(), next: begin, step: p.decode / (tokens - 1)}
	s.end = sync.OnceFunc(func() { p.slots <- s.next })
	return respond(r, "text/event-stream", s), nil
}

func respond(r *http.Request, kind string, body io.ReadCloser) *http.Response {
	return &http.Response{StatusCode: http.StatusOK, Status: "200 OK", Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {kind}}, Body: body, ContentLength: -1, Request: r}
}

// stream is D's response: the first token at once, the last after the time for a response.
type stream struct {
	ctx  context.Context
	next time.Time     // of the token that was sent last
	step time.Duration // between two tokens
	sent int
	rest string
	end  func()
}

const tokens = 8

func (s *stream) Read(b []byte) (int, error) {
	if s.rest == "" {
		switch s.sent++; {
		case s.sent > tokens:
			return 0, io.EOF
		case s.sent > 1:
			s.next = s.next.Add(s.step)
			if err := sleepUntil(s.ctx, s.next); err != nil {
				return 0, err
			}
		}
		s.rest = fmt.Sprintf("data: {\"choices\":[{\"text\":\"%d\"}]}\n\n", s.sent)
		if s.sent == tokens {
			s.rest += "data: [DONE]\n\n"
		}
	}
	n := copy(b, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

func (s *stream) Close() error {
	s.end()
	return nil
}

// hold waits for one of what is free. It returns when it could have had it: when it came, or when that got free.
func hold(ctx context.Context, free chan time.Time) (time.Time, error) {
	came := time.Now()
	select {
	case since := <-free:
		if since.After(came) {
			return since, nil
		}
		return came, nil
	case <-ctx.Done():
		return came, ctx.Err()
	}
}

func sleepUntil(ctx context.Context, at time.Time) error {
	t := time.NewTimer(time.Until(at))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
