// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/lab/internal/paced"
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

// body asks for a response of as many tokens as the engines make for all.
const body = `{"model":"m","prompt":"hello","max_tokens":8,"stream":true}`

// measure offers the load: requests come by chance (Poisson), and none waits for another.
func measure(ctx context.Context, r run, seed uint64) (*result, error) {
	g, err := open(ctx, r)
	if err != nil {
		return nil, err
	}
	defer g.stop()
	load := paced.Poisson(rand.New(rand.NewPCG(seed, 1)), r.capacity*r.load, r.lasts) //nolint:gosec // no secret
	res := &result{offered: len(load), seconds: make([]second, int(r.lasts.Seconds())+1)}
	for i := range load {
		load[i].Body = []byte(body)
	}
	begun := time.Now()
	slower := time.AfterFunc(r.lasts/2, func() { g.engines.slower.Store(r.slower) })
	defer slower.Stop()
	firsts := make([]time.Time, len(load))
	err = paced.Offer(ctx, load, r.patience, g.send, func(i int, from io.Reader) error {
		firsts[i] = time.Now() // a flow and an HTTP client return when the first byte is there
		_, err := io.Copy(io.Discard, from)
		return err
	}, func(i int, sent time.Time, err error) {
		res.count(min(sent.Sub(begun), r.lasts), firsts[i].Sub(begun), time.Since(begun), err, r.lasts)
	})
	if g.limits != nil {
		res.full = g.limits.State().Refused["queue_full"]
	}
	for _, sorted := range [][]float64{res.took, res.first, res.refusing} {
		slices.Sort(sorted)
	}
	for _, s := range res.seconds {
		slices.Sort(s.took)
	}
	return res, err
}

// gateway is a flow before one pair of engines.
type gateway struct {
	flow    *pdflow.Flow
	limits  *admit.Picker // nil: none
	engines *pair
	send    paced.Client
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
	var list []discovery.Endpoint
	called := paced.Handlers{}
	for role, engine := range map[discovery.Role]http.HandlerFunc{
		discovery.RolePrefill: engines.servePrefill, discovery.RoleDecode: engines.serveDecode} {
		host := role.String()
		if called[host] = engine; r.http {
			host = g.serve(engine)
		}
		list = append(list, discovery.Endpoint{ID: host, URL: &url.URL{Scheme: "http", Host: host}, Role: role})
	}
	if !r.http {
		options = append(options, pdflow.WithTransport(called))
	}
	conn, err := plainhttp.New(nil)
	if err != nil {
		return nil, err
	}
	set, err := static.NewSet(list...)
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
	if g.send = paced.Calls(g.flow); r.http {
		client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1000}}
		g.send = paced.Posts("http://"+g.serve(g.flow), client)
		g.ends = append(g.ends, client.CloseIdleConnections)
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

// quantile of sorted values, 0 if there are none.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}
