// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"context"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// Questions is what engines are asked. It is a bit set.
type Questions uint8

// The questions; see the package's documentation.
const (
	Models        Questions = 1 << iota // GET /v1/models
	Version                             // GET /version
	Metrics                             // GET /metrics
	MooncakeQuery                       // GET <bootstrap>/query
	SGLangInfo                          // GET /server_info
	All           = Models | Version | Metrics | MooncakeQuery | SGLangInfo
)

// Options are a [Source]'s settings. A zero or negative number means the default.
type Options struct {
	Ask Questions // default All

	Interval     time.Duration // between two full visits of one engine, give or take 5 %; default 30 s
	LoadInterval time.Duration // between two readings of /metrics; default: only with full visits
	Timeout      time.Duration // of one question, its whole answer included; default 2 s
	Concurrency  int           // engines visited at once, each asked one question after another; default 8

	// Client carries the questions. The default has connections of its own, no proxy and no redirects. It must not
	// follow redirects, and must be safe for concurrent use.
	Client http.RoundTripper
	// Header goes with each question, for engines that want a key.
	Header http.Header

	// Observe is told of each question that failed or whose answer made no sense, by an *[Error]. It is called from
	// several goroutines and must be quick.
	Observe func(id string, err error)
}

// Reading is what an engine said of itself, whether or not its list said it already. Fields that it did not say are
// zero.
type Reading struct {
	At            time.Time      // end of the last full visit
	Model         string         // only if the list has none
	Version       string         // only if the list has none
	DPSize        int            // data-parallel ranks behind the endpoint
	BootstrapPort int            // of an SGLang prefill engine
	EngineIDs     map[int]string // Mooncake's, by rank; not to be changed
	Load          Load

	started float64 // process_start_time_seconds: another value is another process
}

// Load is how busy an engine said it was.
type Load struct {
	At      time.Time // zero: it did not say
	KVUsage float64   // 0 to 1, of the fullest rank
	Running int       // requests, of all ranks
	Waiting int       // requests in the queue, of all ranks
}

// Source is a source whose engines are asked. Make it with [Wrap].
type Source struct {
	inner   discovery.Source
	o       Options
	own     *http.Transport // nil when the client is the caller's
	version atomic.Uint64   // of what is published

	mu      sync.Mutex
	known   map[string]known // by ID; outlives a Watch, so that a failure of the list costs no facts
	watches map[*watch]struct{}
}

// known is what was learnt of the engine at an address.
type known struct {
	url string
	r   Reading
}

// Wrap returns a source that publishes the lists of inner, with what the engines say of themselves. A nil o means the
// defaults.
func Wrap(inner discovery.Source, o *Options) *Source {
	s := &Source{inner: inner, known: map[string]known{}, watches: map[*watch]struct{}{}}
	if o != nil {
		s.o = *o
	}
	if s.o.Ask == 0 {
		s.o.Ask = All
	}
	s.o.Interval = orDefault(s.o.Interval, 30*time.Second)
	s.o.Timeout = orDefault(s.o.Timeout, 2*time.Second)
	s.o.Concurrency = orDefault(s.o.Concurrency, 8)
	if s.o.Client == nil {
		s.own = &http.Transport{
			DialContext:            (&net.Dialer{Timeout: s.o.Timeout}).DialContext,
			TLSHandshakeTimeout:    s.o.Timeout,
			MaxIdleConnsPerHost:    1,
			IdleConnTimeout:        4 * time.Second, // before uvicorn, which closes after 5 s
			DisableCompression:     true,            // an answer's size is then what it costs
			MaxResponseHeaderBytes: 16 << 10,
		}
		s.o.Client = s.own
	}
	return s
}

func orDefault[T int | time.Duration](v, otherwise T) T {
	if v <= 0 {
		return otherwise
	}
	return v
}

// Watch watches the wrapped source and visits its engines until ctx ends; no question is under way when it returns. It
// fails as the wrapped source does, and what was learnt is still there when it is called again. Draining engines are
// not visited.
func (s *Source) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w := newWatch(ctx, s, publish)
	s.mu.Lock()
	s.watches[w] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.watches, w)
		s.mu.Unlock()
		if s.own != nil {
			s.own.CloseIdleConnections()
		}
	}()
	w.running.Go(w.watchInner)
	err := w.loop()
	cancel()
	w.running.Wait()
	return err
}

// Reading returns what the engine said. It may be called at any time, and does not block on engines.
func (s *Source) Reading(id string) (Reading, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k, ok := s.known[id]
	return k.r, ok
}

// Refresh has an engine visited at once: for a caller that knows that it has restarted, for example a health probe that
// it passes again. An ID that is not listed is none's business.
func (s *Source) Refresh(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		w.askFor(id)
	}
}

func (s *Source) of(id, url string) (Reading, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k, ok := s.known[id]
	return k.r, ok && k.url == url
}

func (s *Source) learn(id, url string, r Reading) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known[id] = known{url, r}
}

// keep forgets all engines but the listed.
func (s *Source) keep(listed map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.known {
		if !listed[id] {
			delete(s.known, id)
		}
	}
}
