// SPDX-License-Identifier: Apache-2.0

package paced

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/pdflow"
)

// Fleet is prefill engines and, after them, decode engines.
type Fleet struct {
	Prefill int
	Specs   []model.Spec
	Link    model.Link
	URLs    []string // of engines that run: those that Start has started, or real ones
}

// Start starts the engines. Those that decode serve alone, too.
func (f *Fleet) Start() (stop func(), err error) {
	var all []*enginesim.Engine
	stop = func() {
		for _, e := range all {
			_ = e.Close()
		}
	}
	f.URLs = nil
	for i := range f.Specs {
		cfg := enginesim.Config{Timing: &f.Specs[i], Link: f.Link, KVRole: enginesim.RoleProducer, KeepRequests: -1}
		if i >= f.Prefill {
			cfg.KVRole = enginesim.RoleBoth
		}
		e, err := enginesim.Start(cfg)
		if err != nil {
			stop()
			return nil, err
		}
		all, f.URLs = append(all, e), append(f.URLs, e.URL())
	}
	return stop, nil
}

// Name is an engine's ID in discovery.
func (f *Fleet) Name(i int) string {
	if i < f.Prefill {
		return "p" + strconv.Itoa(i)
	}
	return "d" + strconv.Itoa(i-f.Prefill)
}

// Set is a set of the engines.
func (f *Fleet) Set() (*discovery.Set, error) {
	var all []discovery.Endpoint
	for i, url := range f.URLs {
		role := discovery.RolePrefill
		if i >= f.Prefill {
			role = discovery.RoleDecode
		}
		e, err := discovery.New(url, role)
		if err != nil {
			return nil, err
		}
		e.ID = f.Name(i)
		all = append(all, e)
	}
	return static.NewSet(all...)
}

// Result is what clients saw of a load, in seconds, by request. A request that was refused has no times.
type Result struct {
	TTFT, TPOT []float64
	Refused    int
	Gaps       model.Histogram
}

// Play sends a load through a flow in real time. RequestID is the place in the load.
func Play(ctx context.Context, flow *pdflow.Flow, load []Request) (*Result, error) {
	r := &Result{TTFT: make([]float64, len(load)), TPOT: make([]float64, len(load))}
	var failed error
	var mu sync.Mutex
	var wg sync.WaitGroup
	begun := time.Now()
	for i := range load {
		at := time.Duration(load[i].At * float64(time.Second))
		timer := time.NewTimer(at - time.Since(begun))
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			tokens, err := ask(ctx, flow, i, load[i].Body)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case errors.Is(err, pdflow.CodeOverloaded):
				r.Refused++
				return
			case err != nil:
				failed = err
				return
			case len(tokens) != load[i].Output:
				failed = fmt.Errorf("%d tokens came in place of %d", len(tokens), load[i].Output)
				return
			}
			first, last := tokens[0].Sub(begun).Seconds(), tokens[len(tokens)-1].Sub(begun).Seconds()
			r.TTFT[i], r.TPOT[i] = first-load[i].At, (last-first)/float64(max(load[i].Output-1, 1))
			for k := 1; k < len(tokens); k++ {
				r.Gaps.Add(tokens[k].Sub(tokens[k-1]).Seconds(), 1)
			}
		})
	}
	wg.Wait()
	return r, errors.Join(failed, ctx.Err())
}

// ask sends a request and returns when its tokens came.
func ask(ctx context.Context, flow *pdflow.Flow, i int, body []byte) (tokens []time.Time, err error) {
	resp, err := flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: body,
		RequestID: strconv.Itoa(i)})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return Arrivals(resp.Body, nil)
}

// Arrivals are when the tokens of a streamed completion came. An engine that is behind sends several in one event.
// heard is told how many there are, if it is not nil.
func Arrivals(events io.Reader, heard func(tokens int)) (tokens []time.Time, err error) {
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
