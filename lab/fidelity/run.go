// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

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

// engines are the entries of two prefill and two decode engines.
func engines(urls [4]string) (all []discovery.Endpoint, err error) {
	for i, url := range urls {
		role := discovery.RolePrefill
		if i >= 2 {
			role = discovery.RoleDecode
		}
		e, err := discovery.New(url, role)
		if err != nil {
			return nil, err
		}
		e.ID = names[i]
		all = append(all, e)
	}
	return all, nil
}

var names = [4]string{"p0", "p1", "d0", "d1"}

func newPicker(urls [4]string, policy pick.Policy, seed uint64) (pdflow.Picker, error) {
	all, err := engines(urls)
	if err != nil {
		return nil, err
	}
	set, err := static.NewSet(all...)
	if err != nil {
		return nil, err
	}
	return pick.New(set, policy, pick.WithSeed(seed)), nil
}

func inVirtualTime(ctx context.Context, policy pick.Policy, load []request, seed uint64) (*result, error) {
	urls := [4]string{"http://p0:1", "http://p1:1", "http://d0:1", "http://d1:1"}
	picker, err := newPicker(urls, policy, seed)
	if err != nil {
		return nil, err
	}
	conn, err := nixl.New(nil)
	if err != nil {
		return nil, err
	}
	picker = picker.Bind(conn, conn.Traits().Serving)
	places := map[string]int{}
	for i, name := range names {
		places[name] = i
	}
	s := spec()
	cfg := virtual.Config{Engines: []model.Spec{s, s, s, s}, Link: func(int, int) model.Link { return link }}
	out, err := virtual.Run(ctx, cfg, func(yield func(virtual.Arrival) bool) {
		for i := range load {
			q := &load[i]
			if !yield(virtual.Arrival{At: q.at, Prompt: len(q.prompt), Output: q.output, Keys: q.keys()}) {
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
		r.ttft[i], r.tpot[i], r.pairs[i] = o.TTFT(), o.TPOT(), [2]string{names[max(o.Prefill, 0)], names[o.Decode]}
	}
	return r, nil
}

func inRealTime(ctx context.Context, policy pick.Policy, load []request, seed uint64) (*result, error) {
	s := spec()
	var urls [4]string
	for i := range urls {
		cfg := enginesim.Config{Timing: &s, Link: link, KVRole: enginesim.RoleProducer, KeepRequests: -1}
		if i >= 2 {
			cfg.KVRole = enginesim.RoleConsumer
		}
		e, err := enginesim.Start(cfg)
		if err != nil {
			return nil, err
		}
		defer e.Close()
		urls[i] = e.URL()
	}
	picker, err := newPicker(urls, policy, seed)
	if err != nil {
		return nil, err
	}
	conn, err := nixl.New(nil)
	if err != nil {
		return nil, err
	}
	r := newResult(len(load))
	var mu sync.Mutex
	flow, err := pdflow.New(conn, picker, pdflow.WithObserver(pdflow.Observer{
		SessionEnd: func(_ context.Context, o *pdflow.Outcome) {
			if i, err := strconv.Atoi(o.Session.RequestID); err == nil {
				mu.Lock()
				defer mu.Unlock()
				r.pairs[i-1] = [2]string{o.Session.Prefill.ID, o.Session.Decode.ID}
			}
		},
	}))
	if err != nil {
		return nil, err
	}
	defer func() { _ = flow.Shutdown(context.WithoutCancel(ctx)) }()
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
		RequestID: strconv.Itoa(i + 1)})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if bytes.HasPrefix(lines.Bytes(), []byte("data: {")) {
			tokens = append(tokens, time.Now())
		}
	}
	return tokens, lines.Err()
}
