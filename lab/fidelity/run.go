// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/virtual"
	"github.com/pdkit/pdkit/lab/internal/paced"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// result is what clients saw of a load, and which pair served each request.
type result struct {
	*paced.Result
	pairs [][2]string
}

// fleet is simulated engines, or two real ones and what was fitted to them.
type fleet struct{ paced.Fleet }

func (f *fleet) picker(policy pick.Policy, seed uint64) (pdflow.Picker, error) {
	set, err := f.Set()
	if err != nil {
		return nil, err
	}
	return pick.New(set, policy, pick.WithSeed(seed)), nil
}

func (f *fleet) inVirtualTime(ctx context.Context, policy pick.Policy, load []request, seed uint64) (*result, error) {
	picker, err := f.picker(policy, seed)
	if err != nil {
		return nil, err
	}
	conn, err := nixl.New(nil)
	if err != nil {
		return nil, err
	}
	picker = picker.Bind(conn, conn.Traits().Serving)
	places := map[string]int{}
	for i := range f.Specs {
		places[f.Name(i)] = i
	}
	cfg := virtual.Config{Engines: f.Specs, Link: func(int, int) model.Link { return f.Link }}
	blockSize := f.Specs[0].BlockSize
	out, err := virtual.Run(ctx, cfg, func(yield func(virtual.Arrival) bool) {
		for i := range load {
			q := &load[i]
			if !yield(virtual.Arrival{At: q.At, Prompt: len(q.Prompt), Output: q.Output, Keys: q.Keys(blockSize)}) {
				return
			}
		}
	}, func(_ *virtual.Fleet, i int, _ *virtual.Arrival) (virtual.Route, error) {
		request, err := connector.ParseRequest(connector.APICompletions, load[i].Body)
		if err != nil {
			return virtual.Route{}, err
		}
		return simulate.Route(ctx, picker, places, &pdflow.PickInput{Request: request, Attempt: 1})
	})
	if err != nil {
		return nil, err
	}
	r := &result{Result: &paced.Result{Gaps: out.Gaps}}
	for i := range out.Outcomes {
		o := &out.Outcomes[i]
		r.TTFT, r.TPOT = append(r.TTFT, o.TTFT()), append(r.TPOT, o.TPOT())
		r.pairs = append(r.pairs, [2]string{f.Name(max(o.Prefill, 0)), f.Name(o.Decode)})
	}
	return r, nil
}

// flow is what sends requests to the engines in real time; ended is told of each.
func (f *fleet) flow(
	ctx context.Context, policy pick.Policy, seed uint64, ended func(*connector.Session),
) (flow *pdflow.Flow, stop func(), err error) {
	picker, err := f.picker(policy, seed)
	if err != nil {
		return nil, nil, err
	}
	conn, err := nixl.New(nil)
	if err == nil {
		flow, err = pdflow.New(conn, picker, pdflow.WithObserver(pdflow.Observer{
			SessionEnd: func(_ context.Context, o *pdflow.Outcome) { ended(o.Session) }}))
	}
	return flow, func() { _ = flow.Shutdown(context.WithoutCancel(ctx)) }, err
}

func (f *fleet) inRealTime(ctx context.Context, policy pick.Policy, load []request, seed uint64) (*result, error) {
	r := &result{pairs: make([][2]string, len(load))}
	var mu sync.Mutex
	flow, stop, err := f.flow(ctx, policy, seed, func(s *connector.Session) {
		if i, err := strconv.Atoi(s.RequestID); err == nil {
			mu.Lock()
			defer mu.Unlock()
			r.pairs[i] = [2]string{s.Prefill.ID, s.Decode.ID}
		}
	})
	if err != nil {
		return nil, err
	}
	defer stop()
	if r.Result, err = paced.Play(ctx, paced.Calls(flow), load); err == nil && r.Refused > 0 {
		err = fmt.Errorf("%d requests were refused", r.Refused)
	}
	return r, err
}
