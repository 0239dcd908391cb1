// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/cmd/pdctl/simulate"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/virtual"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// result is what clients saw of a load: seconds.
type result struct {
	ttft, tpot []float64 // by request
	gaps       model.Histogram
	pairs      [][2]string
	failed     int
	late       float64 // by how much the latest request left after its time; of real time only
}

func newResult(n int) *result {
	return &result{ttft: make([]float64, n), tpot: make([]float64, n), pairs: make([][2]string, n)}
}

// fleet is prefill engines and, after them, decode engines.
type fleet struct {
	prefill int
	specs   []model.Spec
	link    model.Link
	urls    []string // in real time
}

// paced starts simulated engines, of which the first ones prefill.
func paced(prefill int, specs []model.Spec, link model.Link) (f *fleet, stop func(), err error) {
	f = &fleet{prefill: prefill, specs: specs, link: link}
	var all []*enginesim.Engine
	stop = func() {
		for _, e := range all {
			_ = e.Close()
		}
	}
	for i := range specs {
		cfg := enginesim.Config{Timing: &specs[i], Link: link, KVRole: enginesim.RoleProducer, KeepRequests: -1}
		if i >= prefill {
			cfg.KVRole = enginesim.RoleConsumer
		}
		e, err := enginesim.Start(cfg)
		if err != nil {
			stop()
			return nil, nil, err
		}
		all, f.urls = append(all, e), append(f.urls, e.URL())
	}
	return f, stop, nil
}

// name is an engine's ID in discovery.
func (f *fleet) name(i int) string {
	if i < f.prefill {
		return "p" + strconv.Itoa(i)
	}
	return "d" + strconv.Itoa(i-f.prefill)
}

func (f *fleet) picker(policy pick.Policy, seed uint64) (pdflow.Picker, error) {
	var all []discovery.Endpoint
	for i, url := range f.urls {
		role := discovery.RolePrefill
		if i >= f.prefill {
			role = discovery.RoleDecode
		}
		e, err := discovery.New(url, role)
		if err != nil {
			return nil, err
		}
		e.ID = f.name(i)
		all = append(all, e)
	}
	set, err := static.NewSet(all...)
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
	for i := range f.specs {
		places[f.name(i)] = i
	}
	cfg := virtual.Config{Engines: f.specs, Link: func(int, int) model.Link { return f.link }}
	blockSize := f.specs[0].BlockSize
	out, err := virtual.Run(ctx, cfg, func(yield func(virtual.Arrival) bool) {
		for i := range load {
			q := &load[i]
			if !yield(virtual.Arrival{At: q.at, Prompt: len(q.prompt), Output: q.output, Keys: q.keys(blockSize)}) {
				return
			}
		}
	}, func(_ *virtual.Fleet, i int, _ *virtual.Arrival) (virtual.Route, error) {
		request, err := connector.ParseRequest(connector.APICompletions, load[i].body)
		if err != nil {
			return virtual.Route{}, err
		}
		return simulate.Route(ctx, picker, places, &pdflow.PickInput{Request: request, Attempt: 1})
	})
	if err != nil {
		return nil, err
	}
	r := newResult(len(load))
	r.gaps = out.Gaps
	for i := range out.Outcomes {
		o := &out.Outcomes[i]
		r.ttft[i], r.tpot[i], r.pairs[i] = o.TTFT(), o.TPOT(), [2]string{f.name(max(o.Prefill, 0)), f.name(o.Decode)}
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
	r := newResult(len(load))
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
	var wg sync.WaitGroup
	begun := time.Now()
	for i := range load {
		at := time.Duration(load[i].at * float64(time.Second))
		timer := time.NewTimer(at - time.Since(begun))
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		r.late = max(r.late, (time.Since(begun) - at).Seconds())
		wg.Go(func() {
			tokens, err := ask(ctx, flow, i, load[i].body)
			mu.Lock()
			defer mu.Unlock()
			if err != nil || len(tokens) != load[i].output {
				r.failed++
				return
			}
			first, last := tokens[0].Sub(begun).Seconds(), tokens[len(tokens)-1].Sub(begun).Seconds()
			r.ttft[i], r.tpot[i] = first-load[i].at, (last-first)/float64(max(load[i].output-1, 1))
			for k := 1; k < len(tokens); k++ {
				r.gaps.Add(tokens[k].Sub(tokens[k-1]).Seconds(), 1)
			}
		})
	}
	wg.Wait()
	if r.failed > 0 && ctx.Err() == nil {
		return nil, errors.New(strconv.Itoa(r.failed) + " requests failed")
	}
	return r, ctx.Err()
}

// ask sends a request and returns when its tokens came.
func ask(ctx context.Context, flow *pdflow.Flow, i int, body []byte) (tokens []time.Time, err error) {
	resp, err := flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: body,
		RequestID: strconv.Itoa(i)})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return arrivals(resp.Body, nil)
}

// arrivals are when the tokens of a streamed completion came. An engine that is behind sends several in one event.
// heard is told how many there are, if it is not nil.
func arrivals(events io.Reader, heard func(tokens int)) (tokens []time.Time, err error) {
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, _ := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		now := time.Now()
		for range gjson.GetBytes(data, "choices.0.token_ids.#").Int() {
			tokens = append(tokens, now)
			if heard != nil {
				heard(len(tokens))
			}
		}
	}
	return tokens, lines.Err()
}
