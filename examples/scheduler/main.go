// SPDX-License-Identifier: Apache-2.0

// Scheduler scores the engines of each request by rules of its own. Which engines may serve, retries and the transfer
// are pdkit's: pick.Score makes a picker of the scores. Its plugins are those of a router: scorers and post-hooks.
//
//	go run ./examples/scheduler -prefill http://127.0.0.1:8100,http://127.0.0.1:8101 -decode http://127.0.0.1:8200
package main

import (
	"context"
	"flag"
	"hash/maphash"
	"log"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func main() {
	prefill := flag.String("prefill", "http://127.0.0.1:8100", "URLs of prefill engines, separated by commas")
	decode := flag.String("decode", "http://127.0.0.1:8200", "URLs of decode engines, separated by commas")
	listen := flag.String("listen", "127.0.0.1:8000", "where clients connect")
	flag.Parse()
	s, err := newScheduler(context.Background(), *prefill, *decode)
	if err != nil {
		log.Fatal(err)
	}
	server := http.Server{Addr: *listen, Handler: s.flow, ReadHeaderTimeout: 10 * time.Second}
	log.Fatal(server.ListenAndServe())
}

const prefixSize = 512 // the bytes of a body by which the scheduler remembers its prefill engine

// request is one client's request, as scorers see it.
type request struct {
	prefix uint64 // 0: too short to be remembered
	tokens int    // an estimate of the prompt's tokens
}

func (s *scheduler) requestOf(c *connector.ClientRequest) (r request) {
	if c == nil {
		return r
	}
	r.tokens = len(c.Body()) / 4
	if len(c.Body()) >= prefixSize {
		r.prefix = maphash.Bytes(s.seed, c.Body()[:prefixSize])
	}
	return r
}

// scorer gives an engine a score from 0 (worst) to 1. The caller holds the scheduler's lock.
type scorer struct {
	role   discovery.Role
	weight float64
	score  func(r request, e *discovery.Endpoint) float64
}

// postHook learns from an attempt when both legs have ended: for a stream, after its last byte.
type postHook func(r request, prefill, decode string, o *pdflow.Outcome)

// scheduler is a flow whose pairs are chosen by scorers.
type scheduler struct {
	set     *discovery.Set
	engines *inspect.Source // the engines and the load that they report
	flow    *pdflow.Flow
	scorers []scorer
	hooks   []postHook

	mu    sync.Mutex
	load  map[string]int    // by engine: tokens that it prefills, or streams that it decodes
	known map[uint64]string // by prefix: the prefill engine that has its KV
	seed  maphash.Seed
}

// newScheduler makes a scheduler over engines whose list and load are kept up to date until ctx ends.
func newScheduler(ctx context.Context, prefill, decode string, opts ...pdflow.Option) (*scheduler, error) {
	var endpoints []discovery.Endpoint
	for i, raw := range slices.Concat(strings.Split(prefill, ","), strings.Split(decode, ",")) {
		role := discovery.RolePrefill
		if i > strings.Count(prefill, ",") {
			role = discovery.RoleDecode
		}
		e, err := discovery.New(raw, role)
		if err != nil {
			return nil, err
		}
		endpoints = append(endpoints, e)
	}
	list, err := static.New(endpoints...)
	if err != nil {
		return nil, err
	}
	conn, err := nixl.New(nil)
	if err != nil {
		return nil, err
	}
	s := &scheduler{engines: inspect.Wrap(list, &inspect.Options{LoadInterval: time.Second}), load: map[string]int{},
		known: map[uint64]string{}, seed: maphash.MakeSeed()}
	s.set = discovery.NewSet(s.engines)
	go func() { _ = s.set.Run(ctx) }() // its error is always nil
	s.scorers = []scorer{
		{discovery.RolePrefill, 1, func(r request, e *discovery.Endpoint) float64 {
			return 1 / (1 + float64(s.load[e.ID])/float64(1+r.tokens))
		}},
		{discovery.RolePrefill, 0.8, func(r request, e *discovery.Endpoint) float64 {
			if r.prefix != 0 && s.known[r.prefix] == e.ID {
				return 1
			}
			return 0
		}},
		{discovery.RoleDecode, 1, func(_ request, e *discovery.Endpoint) float64 {
			return 1 / (1 + float64(s.load[e.ID]))
		}},
		{discovery.RoleDecode, 0.5, func(_ request, e *discovery.Endpoint) float64 {
			said, _ := s.engines.Reading(e.ID) // an engine that has said nothing yet counts as one with an empty cache
			return 1 - said.Load.KVUsage
		}},
	}
	s.hooks = []postHook{s.remember}
	reserved := pdflow.Observer{
		SessionStart: func(_ context.Context, x *connector.Session) { s.reserve(x, 1) },
		SessionEnd: func(_ context.Context, o *pdflow.Outcome) {
			s.reserve(o.Session, -1)
			for _, hook := range s.hooks {
				hook(s.requestOf(o.Session.Request), o.Session.Prefill.ID, o.Session.Decode.ID, o)
			}
		},
	}
	opts = append([]pdflow.Option{pdflow.WithObserver(reserved)}, opts...)
	s.flow, err = pdflow.New(conn, pick.New(s.set, pick.Score(s.score)), opts...)
	return s, err
}

// score adds up what the scorers say of a pair. p is nil where one engine is to serve the whole request.
func (s *scheduler) score(in *pdflow.PickInput, p, d *discovery.Endpoint) (sum float64) {
	r := s.requestOf(in.Request)
	s.mu.Lock() // for the scorers
	defer s.mu.Unlock()
	for _, x := range s.scorers {
		e := d
		if x.role == discovery.RolePrefill {
			e = p
		}
		if e != nil {
			sum += x.weight * x.score(r, e)
		}
	}
	return sum
}

// reserve counts an attempt among its engines' load, or with -1 no longer.
func (s *scheduler) reserve(x *connector.Session, sign int) {
	tokens := s.requestOf(x.Request).tokens
	s.mu.Lock()
	defer s.mu.Unlock()
	if x.Prefill.ID != "" {
		s.load[x.Prefill.ID] += sign * tokens
	}
	s.load[x.Decode.ID] += sign
}

// remember keeps which prefill engine has a prefix in its cache. It does so only after a success: an outcome without
// an error means that the client got the whole response.
func (s *scheduler) remember(r request, prefill, _ string, o *pdflow.Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.known) >= 4096 {
		clear(s.known)
	}
	if r.prefix != 0 && o.Err == nil && o.Mode == pdflow.ModeDisaggregated {
		s.known[r.prefix] = prefill
	}
}
