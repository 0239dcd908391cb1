// SPDX-License-Identifier: Apache-2.0

// Package pace lets goroutines take the time that a modelled engine takes (package enginesim/model), in real time, or
// in the time of a testing/synctest bubble. enginesim's engines are paced by it, and so can be a test's own server.
package pace

import (
	"context"
	"math"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/model"
)

// Engine is a modelled engine whose steps take real time. Steps end when the model says, however late the machine wakes
// up. All methods may be called concurrently. It starts no goroutine; while it has requests, it has a timer.
type Engine struct {
	link  model.Link
	spec  model.Spec
	epoch time.Time

	mu      sync.Mutex
	engine  *model.Engine
	tokens  map[*model.Request]chan<- struct{}
	timer   *time.Timer
	network model.Port // on which KV comes in
}

// New makes an idle engine, to which KV comes over a link.
func New(spec model.Spec, link model.Link) (*Engine, error) {
	e, err := model.New(spec)
	if err != nil {
		return nil, err
	}
	e.EachStep = true
	return &Engine{link: link, spec: spec, epoch: time.Now(), engine: e,
		tokens: map[*model.Request]chan<- struct{}{}}, nil
}

// Turn is a request's place in the engine's steps. One goroutine at a time may use it.
type Turn struct {
	e    *Engine
	r    *model.Request
	made <-chan struct{} // has a token for each one that the engine has made
}

// Join gives the engine a request: r's exported fields say what it is, and nobody may use r afterwards. The error is
// that of model.Engine.Add. The caller calls Leave when it needs no more tokens.
func (e *Engine) Join(r *model.Request) (*Turn, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.engine.Add(r, e.now()); err != nil {
		return nil, err
	}
	made := make(chan struct{}, r.Output)
	e.tokens[r] = made
	e.proceed()
	return &Turn{e: e, r: r, made: made}, nil
}

// Token waits for the next token, or until ctx ends: the error is then its cause.
func (t *Turn) Token(ctx context.Context) error {
	select {
	case <-t.made:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Leave takes the request out of the engine, if it has not ended. A step that runs is not interrupted. Leave may be
// called several times, and of a nil Turn.
func (t *Turn) Leave() {
	if t == nil {
		return
	}
	t.e.mu.Lock()
	defer t.e.mu.Unlock()
	if _, ok := t.e.tokens[t.r]; ok {
		delete(t.e.tokens, t.r)
		t.e.engine.Remove(t.r, t.e.now())
		t.e.proceed()
	}
}

// Fetch waits as long as KV of so many tokens needs to come here, after all that came before.
func (e *Engine) Fetch(ctx context.Context, tokens int) error {
	e.mu.Lock()
	now := e.now()
	at := e.link.Transfer(&model.Port{}, &e.network, float64(tokens)*e.spec.BytesPerToken, now)
	e.mu.Unlock()
	timer := time.NewTimer(time.Duration((at - now) * float64(time.Second)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (e *Engine) now() float64 { return time.Since(e.epoch).Seconds() }

// proceed hands out the tokens that are made by now, and comes back when there are more. The caller holds the lock.
func (e *Engine) proceed() {
	for _, ev := range e.engine.Advance(e.now()) {
		made, ok := e.tokens[ev.Request]
		if !ok {
			continue
		}
		switch ev.Kind {
		case model.First, model.Token:
			made <- struct{}{} // it has room for all of them
		case model.Ended:
			delete(e.tokens, ev.Request)
		default:
		}
	}
	if e.timer != nil {
		e.timer.Stop()
		e.timer = nil
	}
	at, busy := e.engine.Next()
	if !busy {
		return
	}
	// A nanosecond later than that, or rounding could bring it back too early again and again, in a bubble for ever.
	after := time.Duration(math.Ceil(at*float64(time.Second))) + 1 - time.Since(e.epoch)
	e.timer = time.AfterFunc(after, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.proceed()
	})
}
