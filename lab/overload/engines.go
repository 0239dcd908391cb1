// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/pace"
)

// pair is two modelled engines (enginesim/pace). P computes one prompt after
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

// servePrefill answers when the prompt is computed.
func (p *pair) servePrefill(w http.ResponseWriter, r *http.Request) {
	if serve(r, p.prefill, p.prompt(), func() {}) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"text":"a"}]}`)
	}
}

// serveDecode streams tokens.
func (p *pair) serveDecode(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	sent := 0
	serve(r, p.decode, &model.Request{Prompt: 1, Cached: 1, Output: tokens}, func() {
		if sent++; sent < tokens {
			_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"text\":\"%d\"}]}\n\n", sent)
		} else {
			_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"text\":\"%d\"}]}\n\ndata: [DONE]\n\n", sent)
		}
		_ = http.NewResponseController(w).Flush()
	})
}

// serve has an engine make the tokens of a request, and tells of each. It returns false where the gateway has left.
func serve(r *http.Request, e *pace.Engine, q *model.Request, made func()) bool {
	_, _ = io.Copy(io.Discard, r.Body)
	n := q.Output
	turn, err := e.Join(q)
	if err != nil {
		panic(err) // the engines' own requests
	}
	defer turn.Leave()
	for range n {
		if turn.Token(r.Context()) != nil {
			return false
		}
		made()
	}
	return true
}
