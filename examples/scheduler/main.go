// SPDX-License-Identifier: Apache-2.0

// Scheduler chooses the engines of each request by scores of its own and runs the request over them with flow.Do. Its
// loop is that of a router with plugins: it scores, tries the best pairs one after another, and runs the post-hooks.
//
//	go run ./examples/scheduler -prefill http://127.0.0.1:8100,http://127.0.0.1:8101 -decode http://127.0.0.1:8200
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"hash/maphash"
	"io"
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
	server := http.Server{Addr: *listen, Handler: s, ReadHeaderTimeout: 10 * time.Second}
	log.Fatal(server.ListenAndServe())
}

const prefixSize = 512 // the bytes of a body by which the scheduler remembers its prefill engine

// request is one client's request, as scorers see it.
type request struct {
	prefix uint64 // 0: too short to be remembered
	tokens int    // an estimate of the prompt's tokens
}

// scorer gives an engine a score from 0 (worst) to 1. The caller holds the scheduler's lock.
type scorer struct {
	role   discovery.Role
	weight float64
	score  func(r *request, e *discovery.Endpoint) float64
}

// postHook learns from an attempt when both legs have ended: for a stream, after its last byte.
type postHook func(r *request, prefill, decode string, o *pdflow.Outcome)

// scheduler chooses pairs and runs requests over them.
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
		{discovery.RolePrefill, 1, func(r *request, e *discovery.Endpoint) float64 {
			return 1 / (1 + float64(s.load[e.ID])/float64(1+r.tokens))
		}},
		{discovery.RolePrefill, 0.8, func(r *request, e *discovery.Endpoint) float64 {
			if r.prefix != 0 && s.known[r.prefix] == e.ID {
				return 1
			}
			return 0
		}},
		{discovery.RoleDecode, 1, func(_ *request, e *discovery.Endpoint) float64 {
			return 1 / (1 + float64(s.load[e.ID]))
		}},
		{discovery.RoleDecode, 0.5, func(_ *request, e *discovery.Endpoint) float64 {
			said, _ := s.engines.Reading(e.ID) // an engine that has said nothing yet counts as one with an empty cache
			return 1 - said.Load.KVUsage
		}},
	}
	release := func(r *request, p, d string, _ *pdflow.Outcome) { s.reserve(r, p, d, -1) }
	s.hooks = []postHook{release, s.remember}
	// the picker is asked only for requests that come without a Pick
	s.flow, err = pdflow.New(conn, pick.Func(s.pick), opts...)
	return s, err
}

// pick is for requests without a pair of their own: it returns the best pair for any request, without a reservation.
func (s *scheduler) pick(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	pairs := s.schedule(&request{})
	if len(pairs) == 0 {
		return pdflow.Pick{}, pdflow.CodeNoEndpoint
	}
	return pairs[0], nil
}

// schedule returns up to three pairs that could serve a request, the best first. Two pairs that follow each other
// share an engine only if there are too few engines.
func (s *scheduler) schedule(r *request) (pairs []pdflow.Pick) {
	s.mu.Lock() // for the scorers
	defer s.mu.Unlock()
	snap := s.set.Load() // one snapshot for the whole decision
	prefills := s.rank(r, snap, discovery.RolePrefill)
	for i, d := range s.rank(r, snap, discovery.RoleDecode) {
		unfit := func(p discovery.Endpoint) bool { return p.Group != d.Group || p.ID == d.ID }
		fit := slices.DeleteFunc(slices.Clone(prefills), unfit)
		if len(fit) > 0 && len(pairs) < 3 {
			pairs = append(pairs, pdflow.Pick{Prefill: fit[i%len(fit)], Decode: d})
		}
	}
	return pairs
}

// rank filters and scores the engines of a role.
func (s *scheduler) rank(r *request, snap *discovery.Snapshot, role discovery.Role) []discovery.Endpoint {
	var engines []discovery.Endpoint
	scores := map[string]float64{}
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		if e.Phase != discovery.PhaseReady || !e.Role.Has(role) {
			continue
		}
		for _, x := range s.scorers {
			if x.role == role {
				scores[e.ID] += x.weight * x.score(r, e)
			}
		}
		engines = append(engines, *e)
	}
	slices.SortStableFunc(engines, func(a, b discovery.Endpoint) int { return cmp.Compare(scores[b.ID], scores[a.ID]) })
	return engines
}

// ServeHTTP reads a request, tries its pairs, and sends the response of the first pair that serves it.
func (s *scheduler) ServeHTTP(w http.ResponseWriter, hr *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, hr.Body, 32<<20))
	if err != nil || hr.Method != http.MethodPost {
		e := &pdflow.Error{Code: pdflow.CodeInvalid, Message: "want a POST with a body of at most 32 MiB"}
		e.Send(w, hr)
		return
	}
	r := &request{tokens: len(body) / 4}
	if len(body) >= prefixSize {
		r.prefix = maphash.Bytes(s.seed, body[:prefixSize])
	}
	last := &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "no pair of engines is ready", RetryAfter: time.Second}
	for _, pair := range s.schedule(r) {
		in := &pdflow.Request{API: connector.APIOf(hr.URL.Path), Header: hr.Header, Body: body}
		resp, err := s.try(hr.Context(), r, pair, in)
		if err == nil {
			_ = resp.Send(w, hr) // after an error the client's connection is cut, and Done has been told
			return
		}
		if !errors.As(err, &last) || !last.EngineFault() || last.Code == pdflow.CodeTimeout {
			break // another pair would say the same, or nobody waits any more
		}
	}
	last.Send(w, hr)
}

// try reserves a pair and runs the request over it. Done tells the post-hooks once how it ended. Do refuses some
// requests before they begin and does not call Done for them: then try undoes the reservation itself.
func (s *scheduler) try(ctx context.Context, r *request, pair pdflow.Pick,
	in *pdflow.Request) (*pdflow.Response, error) {
	p, d := pair.Prefill.ID, pair.Decode.ID
	told := false
	pair.Done = func(o *pdflow.Outcome) {
		told = true
		for _, hook := range s.hooks {
			hook(r, p, d, o)
		}
	}
	s.reserve(r, p, d, 1)
	in.Pick = &pair
	resp, err := s.flow.Do(ctx, in)
	if err != nil && !told {
		s.reserve(r, p, d, -1)
	}
	return resp, err
}

// reserve counts a request among its engines' load, or with -1 no longer.
func (s *scheduler) reserve(r *request, prefill, decode string, sign int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.load[prefill] += sign * r.tokens
	s.load[decode] += sign
}

// remember keeps which prefill engine has a prefix in its cache. It does so only after a success: an outcome without
// an error means that the client got the whole response.
func (s *scheduler) remember(r *request, prefill, _ string, o *pdflow.Outcome) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.known) >= 4096 {
		clear(s.known)
	}
	if r.prefix != 0 && o.Err == nil && o.Mode == pdflow.ModeDisaggregated {
		s.known[r.prefix] = prefill
	}
}
