// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/model"
)

// pacer lets generations take the time that a modelled engine takes, in real time. Memory is the core's own: the model
// has no bound of blocks, and is told what is cached.
type pacer struct {
	link  model.Link
	spec  model.Spec
	epoch time.Time

	mu      sync.Mutex
	engine  *model.Engine
	tokens  map[*model.Request]chan<- struct{}
	timer   *time.Timer
	network model.Port // on which KV comes in
}

// newPacer makes a pacer; nil for no spec. The spec is valid.
func newPacer(spec *model.Spec, link model.Link) *pacer {
	if spec == nil {
		return nil
	}
	s := *spec
	s.Blocks, s.MaxRunning, s.NoPrefixCache = 0, 0, true
	e, err := model.New(s)
	if err != nil {
		panic(err) // enginesim.Start has validated it
	}
	e.EachStep = true
	return &pacer{link: link, spec: s, epoch: time.Now(), engine: e, tokens: map[*model.Request]chan<- struct{}{}}
}

// turn is a generation's place in the engine's steps.
type turn struct {
	p    *pacer
	r    *model.Request
	made <-chan struct{} // has a token for each one that the engine has made
}

// join gives the engine a prompt of which so many tokens have their KV, and a response of output tokens at most.
func (p *pacer) join(prompt, cached, output int) *turn {
	made := make(chan struct{}, output)
	t := &turn{p: p, r: &model.Request{Prompt: prompt, Cached: cached, Output: output}, made: made}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tokens[t.r] = made
	if err := p.engine.Add(t.r, p.now()); err != nil {
		panic(err) // the lengths are the core's own
	}
	p.proceed()
	return t
}

// token waits for the next token.
func (t *turn) token(ctx context.Context) error {
	select {
	case <-t.made:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// leave ends the turn, if the engine has not ended it yet. t may be nil.
func (t *turn) leave() {
	if t == nil {
		return
	}
	t.p.mu.Lock()
	defer t.p.mu.Unlock()
	if _, ok := t.p.tokens[t.r]; ok {
		delete(t.p.tokens, t.r)
		t.p.engine.Remove(t.r, t.p.now())
		t.p.proceed()
	}
}

// fetched waits as long as KV of so many tokens needs to come here, after all that came before.
func (p *pacer) fetched(ctx context.Context, tokens int) error {
	p.mu.Lock()
	now := p.now()
	at := p.link.Transfer(&model.Port{}, &p.network, float64(tokens)*p.spec.BytesPerToken, now)
	p.mu.Unlock()
	return Sleep(ctx, time.Duration((at-now)*float64(time.Second)))
}

func (p *pacer) now() float64 { return time.Since(p.epoch).Seconds() }

// proceed hands out the tokens that are made by now, and comes back when there are more. The caller holds the lock.
func (p *pacer) proceed() {
	for _, ev := range p.engine.Advance(p.now()) {
		made, ok := p.tokens[ev.Request]
		if !ok {
			continue
		}
		switch ev.Kind {
		case model.First, model.Token:
			made <- struct{}{} // it has room for all of them
		case model.Ended:
			delete(p.tokens, ev.Request)
		default:
		}
	}
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	if at, busy := p.engine.Next(); busy {
		p.timer = time.AfterFunc(time.Duration(at*float64(time.Second))-time.Since(p.epoch), func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.proceed()
		})
	}
}
