// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/lab/internal/endpoints"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// run is one measurement: an offered load for a while.
type run struct {
	by       narrow
	capacity float64        // requests a second that the engines can serve
	load     float64        // offered requests, as a multiple of capacity
	lasts    time.Duration  // of the offered load
	decode   time.Duration  // of one response
	timeout  time.Duration  // of the prefill phase
	limits   *admit.Options // nil: no admission
}

// result is what clients saw.
type result struct {
	offered, served, refused, failed int
	// Seconds, sorted, of requests that came after the first quarter of the run: of those that were served until the
	// first byte and until the end, and of those that were refused.
	first, took, refusing []float64
	goodput               float64 // whole responses a second, after the first quarter
}

// measure offers the load: requests come by chance (Poisson), and none waits for another.
func measure(ctx context.Context, r run, seed uint64) (*result, error) {
	flow, stop, err := gateway(ctx, r)
	if err != nil {
		return nil, err
	}
	defer stop()
	var (
		res   = &result{}
		mu    sync.Mutex
		wg    sync.WaitGroup
		late  int
		rng   = rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // a load, no secret
		begin = time.Now()
		next  = begin
	)
	for {
		next = next.Add(time.Duration(rng.ExpFloat64() / (r.capacity * r.load) * float64(time.Second)))
		if next.Sub(begin) > r.lasts || sleepUntil(ctx, next) != nil {
			break
		}
		res.offered++
		wg.Go(func() {
			start := time.Now()
			first, err := request(ctx, flow)
			end := time.Now()
			mu.Lock()
			defer mu.Unlock()
			warm := start.Sub(begin) > r.lasts/4
			switch {
			case err == nil:
				res.served++
				if warm {
					res.took = append(res.took, end.Sub(start).Seconds())
					res.first = append(res.first, first.Sub(start).Seconds())
				}
				if at := end.Sub(begin); at > r.lasts/4 && at <= r.lasts {
					late++
				}
			case errors.Is(err, pdflow.CodeOverloaded):
				res.refused++
				if warm {
					res.refusing = append(res.refusing, end.Sub(start).Seconds())
				}
			default:
				res.failed++
			}
		})
	}
	wg.Wait()
	res.goodput = float64(late) / (r.lasts * 3 / 4).Seconds()
	slices.Sort(res.took)
	slices.Sort(res.first)
	slices.Sort(res.refusing)
	return res, ctx.Err()
}

// request sends one request and reads the response to its end.
func request(ctx context.Context, flow *pdflow.Flow) (first time.Time, err error) {
	resp, err := flow.Do(ctx, &pdflow.Request{API: connector.APICompletions,
		Body: []byte(`{"model":"m","prompt":"hello","max_tokens":8,"stream":true}`)})
	if err != nil {
		return first, err
	}
	defer resp.Body.Close()
	first = time.Now()
	_, err = io.Copy(io.Discard, resp.Body)
	return first, err
}

// gateway is a flow before one pair of engines.
func gateway(ctx context.Context, r run) (*pdflow.Flow, func(), error) {
	engines := newPair(r.capacity, r.decode, r.by)
	conn, err := plainhttp.New(nil)
	if err != nil {
		return nil, nil, err
	}
	set, stop, err := endpoints.Run(ctx, engines.endpoints()...)
	if err != nil {
		return nil, nil, err
	}
	picker := pick.New(set, pick.RoundRobin())
	if r.limits != nil {
		if picker, err = admit.New(picker, r.limits); err != nil {
			stop()
			return nil, nil, err
		}
	}
	flow, err := pdflow.New(conn, picker, pdflow.WithTransport(engines),
		pdflow.WithTimeouts(config.Timeouts{Prefill: r.timeout}))
	if err != nil {
		stop()
		return nil, nil, err
	}
	return flow, func() { _ = flow.Shutdown(ctx); stop() }, nil
}

// quantile of sorted values, 0 if there are none.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
