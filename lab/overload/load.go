// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery/static"
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
	patience time.Duration  // of clients, until the response's end; 0: endless
	slower   int64          // from the middle of the run on, prompts take so many times as long; 0: as before
	limits   *admit.Options // nil: no admission
	http     bool           // clients, gateway and engines speak HTTP over loopback; else all are calls
}

// result is what clients saw.
type result struct {
	offered, served, refused, failed int
	gone                             int   // clients that gave up
	full                             int64 // of those refused: because the queue was full, whatever the wait

	// Seconds, sorted, of requests that came after the first quarter of the run: of those that were served until the
	// first byte and until the end, and of those that were refused.
	first, took, refusing []float64
	goodput               float64 // whole responses a second, after the first quarter

	seconds []second // of the run
}

// second is one second of a run.
type second struct {
	served int       // responses that ended in it
	took   []float64 // sorted seconds, of served requests that came in it
}

// count adds a request that came and ended at these times after the begin of the run.
func (r *result) count(came, first, ended time.Duration, err error, lasts time.Duration) {
	warm, took := came > lasts/4, (ended - came).Seconds()
	switch {
	case err == nil:
		r.served++
		if warm {
			r.took = append(r.took, took)
			r.first = append(r.first, (first - came).Seconds())
		}
		if ended > lasts/4 && ended <= lasts {
			r.goodput += 1 / (lasts * 3 / 4).Seconds()
		}
		at := &r.seconds[int(came.Seconds())]
		at.took = append(at.took, took)
		if i := int(ended.Seconds()); i < len(r.seconds) {
			r.seconds[i].served++
		}
	case errors.Is(err, pdflow.CodeOverloaded):
		r.refused++
		if warm {
			r.refusing = append(r.refusing, took)
		}
	case errors.Is(err, context.DeadlineExceeded):
		r.gone++
	default:
		r.failed++
	}
}

// measure offers the load: requests come by chance (Poisson), and none waits for another.
func measure(ctx context.Context, r run, seed uint64) (*result, error) {
	g, err := open(ctx, r)
	if err != nil {
		return nil, err
	}
	defer g.stop()
	var (
		res   = &result{seconds: make([]second, int(r.lasts.Seconds())+1)}
		mu    sync.Mutex
		wg    sync.WaitGroup
		rng   = rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // a load, no secret
		begin = time.Now()
		next  = begin
	)
	for {
		next = next.Add(time.Duration(rng.ExpFloat64() / (r.capacity * r.load) * float64(time.Second)))
		if next.Sub(begin) > r.lasts || sleepUntil(ctx, next) != nil {
			break
		}
		if next.Sub(begin) > r.lasts/2 {
			g.engines.slower.Store(r.slower)
		}
		res.offered++
		wg.Go(func() {
			came := time.Since(begin)
			ctx, leave := ctx, context.CancelFunc(func() {})
			if r.patience > 0 {
				ctx, leave = context.WithTimeout(ctx, r.patience)
			}
			defer leave()
			first, err := g.send(ctx)
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			ended := time.Since(begin)
			mu.Lock()
			defer mu.Unlock()
			res.count(min(came, r.lasts), first.Sub(begin), ended, err, r.lasts)
		})
	}
	wg.Wait()
	if g.limits != nil {
		res.full = g.limits.State().Refused["queue_full"]
	}
	for _, sorted := range [][]float64{res.took, res.first, res.refusing} {
		slices.Sort(sorted)
	}
	for _, s := range res.seconds {
		slices.Sort(s.took)
	}
	return res, ctx.Err()
}

const body = `{"model":"m","prompt":"hello","max_tokens":8,"stream":true}`

// gateway is a flow before one pair of engines.
type gateway struct {
	flow    *pdflow.Flow
	limits  *admit.Picker // nil: none
	engines *pair
	url     string // where the flow is served; "": nowhere
	client  *http.Client
	ends    []func()
}

// open makes a gateway.
func open(ctx context.Context, r run) (*gateway, error) {
	engines, err := newPair(r.capacity, r.decode, r.by)
	if err != nil {
		return nil, err
	}
	g := &gateway{engines: engines}
	options := []pdflow.Option{pdflow.WithTimeouts(config.Timeouts{Prefill: r.timeout})}
	prefill, decode := prefillHost, decodeHost
	if r.http {
		prefill, decode = g.serve(g.engines.engine(prefillHost)), g.serve(g.engines.engine(decodeHost))
	} else {
		options = append(options, pdflow.WithTransport(g.engines))
	}
	conn, err := plainhttp.New(nil)
	if err != nil {
		return nil, err
	}
	set, err := static.NewSet(endpoints(prefill, decode)...)
	if err != nil {
		return nil, err
	}
	picker := pick.New(set, pick.RoundRobin())
	if r.limits != nil {
		if g.limits, err = admit.New(picker, r.limits); err != nil {
			return nil, err
		}
		picker = g.limits
	}
	if g.flow, err = pdflow.New(conn, picker, options...); err != nil {
		return nil, err
	}
	g.ends = append(g.ends, func() { _ = g.flow.Shutdown(ctx) })
	if r.http {
		g.url = "http://" + g.serve(g.flow) + "/v1/completions"
		g.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1000}}
		g.ends = append(g.ends, g.client.CloseIdleConnections)
	}
	return g, nil
}

// serve serves a handler at an address of loopback, which it returns.
func (g *gateway) serve(h http.Handler) string {
	s := httptest.NewServer(h)
	g.ends = append(g.ends, s.Close)
	return s.Listener.Addr().String()
}

func (g *gateway) stop() {
	for _, end := range slices.Backward(g.ends) {
		end()
	}
}

// send sends one request and reads the response to its end.
func (g *gateway) send(ctx context.Context) (first time.Time, err error) {
	response := g.post
	if g.url == "" {
		response = g.do
	}
	from, err := response(ctx)
	if err != nil {
		return first, err
	}
	defer from.Close()
	first = time.Now()
	_, err = io.Copy(io.Discard, from)
	return first, err
}

func (g *gateway) do(ctx context.Context) (io.ReadCloser, error) {
	resp, err := g.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: []byte(body)})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

func (g *gateway) post(ctx context.Context) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.url, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := g.client.Do(req)
	if err != nil {
		return nil, err
	}
	switch resp.StatusCode {
	case http.StatusOK:
		return resp.Body, nil
	case http.StatusServiceUnavailable:
		err = pdflow.CodeOverloaded
	default:
		err = errors.New(resp.Status)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return nil, errors.Join(err, resp.Body.Close())
}

// quantile of sorted values, 0 if there are none.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
