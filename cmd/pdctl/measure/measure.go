// SPDX-License-Identifier: Apache-2.0

// Package measure sends streamed requests to servers with OpenAI's API, and reports how fast they were answered. It is
// what pdctl bench does.
//
// In an open loop, requests have planned arrivals, and every latency counts from there: a request that the client sends
// late, because it or the server is busy, has waited since its arrival. Prompts appear in no report.
package measure

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Target is a server that is measured.
type Target struct {
	URL   string // base address, with or without /v1
	Model string
}

// Load is when requests are sent: at Rate, or by Clients.
type Load struct {
	Rate     float64       // open loop: requests a second, with Poisson arrivals
	Clients  int           // closed loop: each sends its next request when the last one has ended
	Duration time.Duration // of the load on each target; 0: until Requests
	Requests int           // to each target; 0: until Duration
}

// SLO is what a request must meet to count as goodput. 0 asks for nothing.
type SLO struct {
	TTFT time.Duration // time to the first token
	TPOT time.Duration // time per output token: the mean time between two tokens of the request
	E2E  time.Duration // end to end: the time to the end of the response
}

// Options describe a run.
type Options struct {
	Targets []Target // one, or two to compare
	Load    Load
	SLO     SLO
	Prompts Prompts
	Seed    uint64        // of arrivals; the same seed gives the same times
	First   int           // number of the first prompt: runs that follow each other need other prompts
	Rounds  int           // of two targets: the load is sent in slices A B B A, that often
	Timeout time.Duration // of one request; 0: none
	Header  http.Header   // of each request

	// Progress, if it is not nil, is called now and then, by one goroutine.
	Progress func(Progress)
}

// Progress is how far a run is.
type Progress struct {
	Done     float64 // share of the run, 0 to 1
	Ended    int
	Failed   int
	InFlight int
}

// slice is an uninterrupted load on one target.
type slice struct {
	target, round int
	nth           int // of this target
	first         int // number of its first request, of this target
	requests      int // 0: until lasts
	lasts         time.Duration
}

// run is a run under way.
type run struct {
	Options
	client *http.Client
	began  time.Time
	sent   []int // requests of each target so far

	mu       sync.Mutex
	samples  []sample
	walls    map[[2]int]time.Duration // of target and round: how long its slices took
	failed   int
	dropped  int // requests that the end of ctx cut
	inFlight atomic.Int64
}

// Run sends the load and waits until all responses have ended. If ctx ends before, the report has what was measured
// until then. An error means that options make no sense.
func Run(ctx context.Context, o Options) (*Report, error) {
	switch {
	case len(o.Targets) < 1 || len(o.Targets) > 2:
		return nil, errors.New("one target, or two to compare")
	case (o.Load.Rate > 0) == (o.Load.Clients > 0):
		return nil, errors.New("either a rate or a number of clients")
	case o.Load.Duration <= 0 && o.Load.Requests <= 0:
		return nil, errors.New("neither a duration nor a number of requests")
	case o.Prompts == nil:
		return nil, errors.New("no prompts")
	}
	transport := &http.Transport{MaxIdleConnsPerHost: 1 << 16, DisableCompression: true,
		IdleConnTimeout: 4 * time.Second} // less than uvicorn's 5 s: a target pauses while others are measured
	defer transport.CloseIdleConnections()
	r := &run{Options: o, client: &http.Client{Transport: transport, Timeout: o.Timeout}, began: time.Now(),
		sent: make([]int, len(o.Targets)), walls: map[[2]int]time.Duration{}}
	for i := range r.sent {
		r.sent[i] = o.First
	}
	slices := r.slices()
	for i, s := range slices {
		if ctx.Err() != nil {
			break
		}
		stop := r.watch(i, len(slices), s)
		r.load(ctx, s)
		stop()
	}
	return r.report(ctx.Err() != nil), nil
}

// slices plans the run. Targets take turns as A B B A, so that what drifts slowly, like a machine that becomes warm,
// strikes both alike.
func (r *run) slices() []slice {
	order := []int{0}
	if len(r.Targets) == 2 {
		order = nil
		for range max(r.Rounds, 1) {
			order = append(order, 0, 1, 1, 0)
		}
	}
	each := len(order) / len(r.Targets)
	nth := make([]int, len(r.Targets))
	var all []slice
	for i, target := range order {
		k := nth[target]
		nth[target]++
		s := slice{target: target, round: i / 4, nth: k, lasts: r.Load.Duration / time.Duration(each)}
		if n := r.Load.Requests; n > 0 {
			s.requests = n*(k+1)/each - n*k/each
			if s.requests == 0 {
				continue
			}
		}
		all = append(all, s)
	}
	return all
}

// load sends a slice's requests and waits for their responses.
func (r *run) load(ctx context.Context, s slice) {
	begin := time.Now()
	s.first = r.sent[s.target]
	var n int
	if r.Load.Rate > 0 {
		n = r.open(ctx, s, begin)
	} else {
		n = r.closed(ctx, s, begin)
	}
	r.sent[s.target] += n
	wall := time.Since(begin)
	if s.requests == 0 && ctx.Err() == nil {
		wall = max(wall, s.lasts) // the time after the last arrival was measured, too
	}
	r.walls[[2]int{s.target, s.round}] += wall
}

// arrivals marks the random numbers of arrivals, beside those of prompts.
const arrivals = 1 << 40

// open sends requests at their arrivals, however many are under way. Both targets get the same arrivals.
func (r *run) open(ctx context.Context, s slice, begin time.Time) (n int) {
	var wg sync.WaitGroup
	defer wg.Wait()
	rng := rand.New(rand.NewPCG(r.Seed, arrivals+uint64(s.nth))) //nolint:gosec // a load, no secret
	next := begin
	for ; s.requests == 0 || n < s.requests; n++ {
		next = next.Add(time.Duration(rng.ExpFloat64() / r.Load.Rate * float64(time.Second)))
		planned := next // of this request alone: its goroutine outlives the turn of the loop
		if s.lasts > 0 && planned.Sub(begin) >= s.lasts {
			return n
		}
		prompt := r.Prompts.Prompt(s.target, s.first+n) // before it is due
		if !sleepUntil(ctx, planned) {
			return n
		}
		wg.Go(func() { r.one(ctx, s, prompt, planned) })
	}
	return n
}

// pause is how long a client of a closed loop waits after a failure, so that a server that refuses at once is not
// stormed.
const pause = 10 * time.Millisecond

// closed lets each client send one request after the other.
func (r *run) closed(ctx context.Context, s slice, begin time.Time) int {
	var wg sync.WaitGroup
	var next atomic.Int64
	for range r.Load.Clients {
		wg.Go(func() {
			for ctx.Err() == nil && (s.lasts == 0 || time.Since(begin) < s.lasts) {
				n := int(next.Add(1)) - 1
				if s.requests > 0 && n >= s.requests {
					return
				}
				prompt := r.Prompts.Prompt(s.target, s.first+n)
				if !r.one(ctx, s, prompt, time.Now()) {
					sleepUntil(ctx, time.Now().Add(pause))
				}
			}
		})
	}
	wg.Wait()
	if s.requests > 0 {
		return min(int(next.Load()), s.requests)
	}
	return int(next.Load())
}

// one sends a request and keeps what was measured. It reports whether the request was served.
func (r *run) one(ctx context.Context, s slice, p Prompt, planned time.Time) bool {
	r.inFlight.Add(1)
	got := r.ask(ctx, r.Targets[s.target], p, planned)
	r.inFlight.Add(-1)
	r.mu.Lock()
	defer r.mu.Unlock()
	if got.fault != "" && ctx.Err() != nil { // it was cut by the end of the run: nobody's failure
		r.dropped++
		return false
	}
	if got.fault != "" {
		r.failed++
	}
	got.target, got.round, got.at = s.target, s.round, planned.Sub(r.began)
	r.samples = append(r.samples, got)
	return got.fault == ""
}

// watch calls Progress while slice number i runs, until the returned function is called.
func (r *run) watch(i, of int, s slice) (stop func()) {
	if r.Progress == nil {
		return func() {}
	}
	begin, before := time.Now(), r.ended()
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			part := 0.0
			if s.lasts > 0 {
				part = time.Since(begin).Seconds() / s.lasts.Seconds()
			}
			if s.requests > 0 {
				part = max(part, float64(r.ended()-before)/float64(s.requests))
			}
			r.mu.Lock()
			p := Progress{Done: (float64(i) + min(part, 1)) / float64(of), Ended: len(r.samples), Failed: r.failed,
				InFlight: int(r.inFlight.Load())}
			r.mu.Unlock()
			r.Progress(p)
			select {
			case <-done:
				return
			case <-tick.C:
			}
		}
	}()
	return func() { close(done); <-ended }
}

func (r *run) ended() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.samples)
}

// sleepUntil reports whether ctx is still alive then.
func sleepUntil(ctx context.Context, at time.Time) bool {
	timer := time.NewTimer(time.Until(at))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return ctx.Err() == nil
	}
}
