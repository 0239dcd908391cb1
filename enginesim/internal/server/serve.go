// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"net/http"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// run runs a call's generations side by side.
func (n *Node) run(ctx context.Context, c *api.Call, emit func(core.Step) error) ([]*core.Outcome, error) {
	outs, errs := make([]*core.Outcome, len(c.Gens)), make([]error, len(c.Gens))
	one := func(i int) {
		var each func(core.Step) error
		if emit != nil {
			each = func(s core.Step) error {
				s.Index = i
				return emit(s)
			}
		}
		outs[i], errs[i] = n.Core.Generate(ctx, n.Conn, c.Gens[i], each)
	}
	if len(c.Gens) == 1 {
		one(0)
		return outs, errs[0]
	}
	var wg sync.WaitGroup
	for i := range c.Gens {
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

// serveStream serves a call as a stream. It sends the status before anything is known of the KV, as vLLM does: a load
// that fails is an event within a 200.
func (n *Node) serveStream(ctx context.Context, w http.ResponseWriter, c *api.Call, fault *Effect) {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Vary", "Origin")
	w.WriteHeader(http.StatusOK)
	s := api.NewSSE(w)
	s.Lock()
	defer s.Unlock()
	n.script(ctx, s, w, fault)

	c.Begin(s)
	s.Unlock()
	var last []core.Step // those that wait for what the connector says at the end
	outs, err := n.run(ctx, c, func(st core.Step) error {
		s.Lock()
		defer s.Unlock()
		if st.Reason != "" && n.cfg.API.StreamParams {
			last = append(last, st)
			return nil
		}
		c.Step(st)
		if s.Broken() {
			return core.ErrKilled
		}
		return nil
	})
	s.Lock()
	for _, st := range last {
		if err == nil {
			st.Params = outs[st.Index].Params
		}
		c.Step(st)
	}
	switch {
	case s.Broken():
		panic(http.ErrAbortHandler)
	case err == nil:
		c.End(outs)
	case errors.Is(err, core.ErrLoadFailed):
		s.Fail(api.ErrInternal)
	case errors.Is(err, core.ErrCoreDead):
		s.Fail(api.ErrEngine)
	default:
		panic(http.ErrAbortHandler)
	}
	if s.Broken() {
		panic(http.ErrAbortHandler)
	}
}
