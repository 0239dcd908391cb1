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

// Questions says what engines are asked. It is a bit set.
type Questions uint8

// The questions; see the package's documentation.
const (
	Models        Questions = 1 << iota // GET /v1/models
	Version                             // GET /version
	Metrics                             // GET /metrics
	MooncakeQuery                       // GET <bootstrap>/query
	SGLangInfo                          // GET /server_info
	Adapters                            // GET /v1/models in each visit, also in those of LoadInterval
	All           = Models | Version | Metrics | MooncakeQuery | SGLangInfo | Adapters
)

// Options are a [Source]'s settings. A zero or negative number means the default.
type Options struct {
	Ask Questions // default All

	// Model is by which name the engines serve the model for which they are listed. Adapters of another model, which
	// an engine may serve beside it, are left out. "": the list's Model; without that, too, adapters of all models.
	Model string

	Interval     time.Duration // between two full visits of one engine, with a jitter of 5 %; default 30 s
	LoadInterval time.Duration // between two readings of /metrics and of adapters; default: only in full visits
	Timeout      time.Duration // of one question with its whole response; default 2 s
	Concurrency  int           // engines visited at once; a visit asks one question after another; default 8

	// Client sends the questions. The default has connections of its own, no proxy and no redirects. A client must not
	// follow redirects, and must be safe for concurrent use. For engines that want a key see transport.WithHeader.
	Client http.RoundTripper

	// Observe is called with an *[Error] for each question that failed or whose response made no sense. Several
	// goroutines call it, and it must be quick.
	Observe func(id string, err error)
}

// Reading holds what an engine said about itself. Fields that it did not say are zero.
type Reading struct {
	At            time.Time      // end of the last full visit
	Model         string         // only if the list has none
	Version       string         // only if the list has none
	DPSize        int            // data-parallel ranks behind the endpoint
	DPStartRank   int            // the number of the first of them among all ranks of the engine
	BootstrapPort int            // of an SGLang prefill engine
	EngineIDs     map[int]string // Mooncake's, by rank; not to be changed
	MaxModelLen   int            // tokens of the model's context
	Adapters      []string       // LoRA adapters that are loaded, in order; not to be changed
	Load          Load

	listed  bool    // /v1/models told of adapters, if only that there are none
	started float64 // process_start_time_seconds; it changes when the process restarts
}

// Load is how busy an engine said it is.
type Load struct {
	At      time.Time // zero: the engine did not say
	KVUsage float64   // 0 to 1, of the fullest rank
	Running int       // requests, of all ranks
	Waiting int       // requests in the queue, of all ranks, with those that fetch KV
	// Fetching is how many of those that wait have their KV on its way from another engine. A vLLM before 0.32.0 does
	// not tell, nor does a prefill engine.
	Fetching int
	KV       KV
}

// Queued is how many requests wait for the engine itself: for its time or its memory.
func (l *Load) Queued() int { return max(0, l.Waiting-l.Fetching) }

// KV is what an engine has counted since it started, of all ranks, and what it holds now. Zero is also what an engine
// says that does not count it; a value that falls says that the engine was restarted.
type KV struct {
	Taken    float64 // prompt tokens whose KV came from another engine or from a store
	Computed float64 // prompt tokens that the engine computed itself

	Generated float64 // tokens that the engine made
	Requests  float64 // that ended, well or not

	Bytes   float64 // of KV moved: NIXL's reader or writer, SGLang's prefill engine
	Seconds float64 // that these moves took
	Failed  float64 // moves that failed
	Expired float64 // requests whose KV nobody read within the lease

	Memory, Disk float64 // bytes that LMCache holds now, in memory and on disk
}

// Source adds facts about engines to the lists of another source. [Wrap] makes one.
type Source struct {
	inner   discovery.Source
	o       Options
	own     *http.Transport // nil if the caller gave a client
	version atomic.Uint64   // of the published lists

	mu      sync.Mutex
	known   map[string]known // by ID; it outlives a Watch, so that a failure of the list loses no facts
	watches map[*watch]struct{}
}

// known is what the engine at an address said.
type known struct {
	url string
	r   Reading
}

// Wrap returns a source that publishes the lists of inner, completed with what the engines say about themselves. A nil
// o means the defaults.
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
			IdleConnTimeout:        4 * time.Second, // less than uvicorn's 5 s
			DisableCompression:     true,            // so that the size bound is the size on the wire
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

// Watch watches the inner source and visits its engines until ctx ends. No question is running when it returns. It
// returns the inner source's errors; the next Watch still knows all facts. It does not visit draining engines.
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

// Reading returns what the engine said. It never waits for engines.
func (s *Source) Reading(id string) (Reading, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k, ok := s.known[id]
	return k.r, ok
}

// Refresh makes the source visit an engine at once. A caller uses it when the engine has restarted, for example when a
// health probe succeeds again. It ignores unknown IDs.
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

// keep forgets all engines that are not listed.
func (s *Source) keep(listed map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.known {
		if !listed[id] {
			delete(s.known, id)
		}
	}
}
