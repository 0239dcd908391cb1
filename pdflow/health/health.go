// SPDX-License-Identifier: Apache-2.0

// Package health probes engines: a GET of /health from each endpoint of a discovery set every two seconds, whose
// verdict is laid over the set. Requests then see an engine that does not answer as not ready.
//
// A probe over an open connection is one net/http request with an empty response. It costs 30 to 60 µs of processor
// time (BenchmarkProbe measures it). The rarer the probes, the more of that is going to sleep and waking up: probes
// that are due at nearly the same time therefore share a wake-up. At the default interval 1,024 endpoints are 512
// probes a second, 2 to 3 % of one processor; a quarter of that where all of them serve requests and the prober is told
// so ([Prober.Answered]). An idle endpoint keeps one connection with its two goroutines: 6 KB of heap and 8 KB of
// stacks.
package health

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// Options are a [Prober]'s settings. A zero or negative number means the default.
type Options struct {
	// Interval is from one probe's start to the next one's, at one endpoint, give or take 6 %, unless it serves
	// requests (Prober.Answered); default 2 s.
	Interval time.Duration
	Timeout  time.Duration // of one probe, connecting and the response's body included; default 2 s

	Failures  int // failed probes in a row that make an endpoint not ready; default 2
	Successes int // good probes in a row that make it ready again; default 1

	Path string // appended to the endpoint's URL; default /health, the path of vLLM, SGLang and TensorRT-LLM

	// Client carries the probes. The default has connections of its own: one per endpoint, no proxy, no redirects,
	// closed after 4 s without use, since engines behind uvicorn close theirs after 5 s. A client with settings
	// for TLS belongs here. It must not follow redirects, and must be safe for concurrent use.
	Client http.RoundTripper

	// Concurrency is how many probes may be under way at once; default 1,024. One endpoint never has two. A response
	// comes in less than a millisecond as a rule, so few goroutines run; only engines that hang take one each.
	Concurrency int

	// Observe is told of every failed probe, with err, and of the good probe that makes an endpoint healthy again,
	// with a nil err. healthy is the verdict after this probe. It is called from many goroutines and must be quick.
	Observe func(id string, healthy bool, err error)
}

// Prober probes the endpoints of one set.
type Prober struct {
	set     *discovery.Set
	o       Options
	own     *http.Transport // nil when the client is the caller's
	running atomic.Bool
	known   atomic.Pointer[map[string]*target] // those of the run
}

var errRunning = errors.New("health: the prober is running already")

// New returns a prober of set's endpoints. A nil o means the defaults.
func New(set *discovery.Set, o *Options) *Prober {
	p := &Prober{set: set}
	if o != nil {
		p.o = *o
	}
	p.o.Interval = cmp.Or(max(p.o.Interval, 0), 2*time.Second)
	p.o.Timeout = cmp.Or(max(p.o.Timeout, 0), 2*time.Second)
	p.o.Failures = cmp.Or(max(p.o.Failures, 0), 2)
	p.o.Successes = cmp.Or(max(p.o.Successes, 0), 1)
	p.o.Concurrency = cmp.Or(max(p.o.Concurrency, 0), 1024)
	p.o.Path = "/" + strings.TrimLeft(cmp.Or(p.o.Path, "/health"), "/")
	if p.o.Client == nil {
		p.own = newTransport(p.o.Timeout)
		p.o.Client = p.own
	}
	return p
}

// Answered says that an endpoint has served a request. It is then asked less often, every fourth time at least: who
// serves is not dead, and a fleet's probes cost more than its idle engines'. An endpoint whose last probe failed, or
// that has not answered one yet, is asked as ever. It is safe for concurrent use and takes some nanoseconds.
func (p *Prober) Answered(id string) {
	known := p.known.Load()
	if known == nil {
		return
	}
	if t := (*known)[id]; t != nil && !t.answered.Load() {
		t.answered.Store(true)
	}
}

// newTransport sizes a transport for many hosts with one short exchange at a time each: the usual 4 KB buffers would
// take 8 MB for 1,024 engines whose responses are an empty body under a hundred bytes of header.
func newTransport(timeout time.Duration) *http.Transport {
	return &http.Transport{
		DialContext:            (&net.Dialer{Timeout: timeout}).DialContext,
		TLSHandshakeTimeout:    timeout,
		MaxIdleConnsPerHost:    1,
		IdleConnTimeout:        4 * time.Second,
		DisableCompression:     true,
		MaxResponseHeaderBytes: 16 << 10,
		WriteBufferSize:        512,
		ReadBufferSize:         1 << 10,
	}
}

// Run probes until ctx ends and returns nil once no goroutine of its own is left. Endpoints that join the set are
// probed at once (many at a time are spread over one interval); those that leave are dropped with what is known of
// them. Draining endpoints are not probed: they take nothing new, and one that is busy with its last responses must not
// be declared dead. Before its first verdict an endpoint counts as its source says. The verdicts stay in the set when
// Run ends. One Run at a time: a second one returns an error at once.
func (p *Prober) Run(ctx context.Context) error {
	if !p.running.CompareAndSwap(false, true) {
		return errRunning
	}
	defer p.running.Store(false)
	if p.own != nil {
		defer p.own.CloseIdleConnections()
	}
	r := newRun(ctx, p)
	defer r.wait()
	r.loop()
	return nil
}
