// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
	"net/http"
	"sync"
)

// run runs a call's generations side by side.
func (n *node) run(ctx context.Context, c *call, emit func(step) error) ([]*outcome, error) {
	outs, errs := make([]*outcome, len(c.gens)), make([]error, len(c.gens))
	one := func(i int) {
		var each func(step) error
		if emit != nil {
			each = func(s step) error {
				s.index = i
				return emit(s)
			}
		}
		outs[i], errs[i] = n.core.generate(ctx, n.conn, c.gens[i], each)
	}
	if len(c.gens) == 1 {
		one(0)
		return outs, errs[0]
	}
	var wg sync.WaitGroup
	for i := range c.gens {
		wg.Go(func() { one(i) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return outs, nil
}

// serveStream answers a call as a stream. The status is sent before anything is
// known of the KV, as vLLM does: a failed load is an event within a 200.
func (n *node) serveStream(ctx context.Context, w http.ResponseWriter, c *call, fault *effect) {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Vary", "Origin")
	w.WriteHeader(http.StatusOK)
	s := &sse{w: w, flush: http.NewResponseController(w), join: n.cfg.EventsPerWrite}
	_ = s.flush.Flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	n.script(ctx, s, fault)

	c.begin(s)
	s.send() // it says that the request is there, and waits for nothing
	s.mu.Unlock()
	outs, err := n.run(ctx, c, func(st step) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		c.step(st)
		if s.broken {
			return errKilled
		}
		return nil
	})
	s.mu.Lock()
	switch {
	case s.broken:
		panic(http.ErrAbortHandler)
	case err == nil:
		c.end(outs)
	case errors.Is(err, errLoadFailed):
		s.fail(errInternal)
	case errors.Is(err, errCoreDead):
		s.fail(errEngine)
	default:
		panic(http.ErrAbortHandler)
	}
	if s.send(); s.broken {
		panic(http.ErrAbortHandler)
	}
}
