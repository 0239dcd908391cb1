// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/pace"
)

// pair is two modelled engines (enginesim/pace), and the round tripper that reaches them. P computes one prompt after
// the other, in the order of arrival, or some of them at a time. As real engines do, it drops requests whose client has
// left, and what it has computed for them is lost. D makes a token of each response in each step, of as many as it has
// places for; the others wait.
type pair struct {
	differ  bool // prompts do
	steps   int  // of P for a prompt
	prompts atomic.Int64
	slower  atomic.Int64 // prompts take so many times as long as at first; 0: as long

	prefill, decode *pace.Engine
}

// narrow says what bounds the rate at which a pair serves.
type narrow string

const (
	narrowPrefill narrow = "prefill" // P's time for a prompt, which is always the same
	narrowPrompts narrow = "prompts" // the same time on average: a few long prompts among short ones
	narrowBatch   narrow = "batch"   // P's time for a prompt, which is long, while it computes 16 of them at a time
	narrowDecode  narrow = "decode"  // D's places
)

const (
	batch  = 16
	tokens = 8    // of a response
	usual  = 1600 // tokens of a prompt on average
)

// newPair makes engines that together serve rate requests a second.
func newPair(rate float64, decode time.Duration, by narrow) (*pair, error) {
	places, prompt := rate*decode.Seconds(), 1/rate
	p := model.Spec{MaxRunning: 1, BlockSize: 16, NoPrefixCache: true}
	steps := 1
	switch by {
	case narrowDecode:
		prompt /= 1.5
	case narrowBatch:
		p.MaxRunning, steps = batch, batch
		fallthrough
	default:
		places *= 1.5
	}
	if p.PerPrefillToken = prompt / usual; by == narrowBatch {
		p.Base, p.PerPrefillToken = prompt, 0
	}
	d := model.Spec{MaxRunning: int(places), BlockSize: 16, NoPrefixCache: true}
	d.Base = decode.Seconds() / tokens
	prefills, err := pace.New(p, model.Link{})
	if err != nil {
		return nil, err
	}
	decodes, err := pace.New(d, model.Link{})
	return &pair{differ: by == narrowPrompts, steps: steps, prefill: prefills, decode: decodes}, err
}

// prompt is a request at P. Where prompts differ, one in ten is seven times as long as the others.
func (p *pair) prompt() *model.Request {
	slower := int(max(1, p.slower.Load()))
	n := usual * slower
	switch {
	case !p.differ:
	case p.prompts.Add(1)%10 == 0:
		n = n * 70 / 16
	default:
		n = n * 10 / 16
	}
	if p.steps > 1 {
		return &model.Request{Prompt: n, Cached: n, Output: p.steps * slower}
	}
	return &model.Request{Prompt: n, Output: 1}
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
	prompt := p.prompt()
	steps := prompt.Output
	turn, err := p.prefill.Join(prompt)
	if err != nil {
		return nil, err
	}
	defer turn.Leave()
	for range steps {
		if err := turn.Token(r.Context()); err != nil {
			return nil, err
		}
	}
	return respond(r, "application/json", io.NopCloser(strings.NewReader(`{"choices":[{"text":"a"}]}`))), nil
}

// serveDecode answers once the first token is there.
func (p *pair) serveDecode(r *http.Request) (*http.Response, error) {
	turn, err := p.decode.Join(&model.Request{Prompt: 1, Cached: 1, Output: tokens})
	if err != nil {
		return nil, err
	}
	if err := turn.Token(r.Context()); err != nil {
		turn.Leave()
		return nil, err
	}
	return respond(r, "text/event-stream", &stream{ctx: r.Context(), turn: turn}), nil
}

func respond(r *http.Request, kind string, body io.ReadCloser) *http.Response {
	return &http.Response{StatusCode: http.StatusOK, Status: "200 OK", Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {kind}}, Body: body, ContentLength: -1, Request: r}
}

// stream is D's response, whose first token is there.
type stream struct {
	ctx  context.Context
	turn *pace.Turn
	sent int
	rest string
}

func (s *stream) Read(b []byte) (int, error) {
	if s.rest == "" {
		switch s.sent++; {
		case s.sent > tokens:
			return 0, io.EOF
		case s.sent > 1:
			if err := s.turn.Token(s.ctx); err != nil {
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
	s.turn.Leave()
	return nil
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
