// SPDX-License-Identifier: Apache-2.0

package responses

import (
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// Limits of searches.
const (
	asksAtOnce   = 16  // engines, over all searches
	asksASecond  = 256 // likewise: who sends one wrong id after another must not have all engines asked for each
	askTimeout   = 2 * time.Second
	searchTime   = 2 * askTimeout // with the wait for a slot
	remembered   = time.Second    // a search's result
	maxSearches  = 1024           // that are remembered
	maxGetReadOn = 4 << 10        // bytes of a response that are read for the connection's sake
)

// searchKey is the response's id and the client's keys: an engine may refuse one client and not another.
type searchKey [sha256.Size]byte

type searches struct {
	slots   chan struct{}
	mu      sync.Mutex
	running map[searchKey]*search // or over, and remembered
	second  int64
	asked   int // in that second
}

// search is one search. engine and err are there when done is closed.
type search struct {
	done   chan struct{}
	over   time.Time
	engine string
	err    error
}

// search returns what a search has found that runs already, or was just made, or makes one.
func (x *Index) search(ctx context.Context, id string, header http.Header) (string, error) {
	key := searchKey(sha256.Sum256([]byte(id + "\n" + header.Get("Authorization") + "\n" + header.Get("X-Api-Key"))))
	engines := x.decodeEngines()
	s, own := x.searches.enter(key, len(engines))
	switch {
	case s == nil:
		return "", ErrUnavailable
	case own:
		// others may wait for it when this client has left
		x.run(context.WithoutCancel(ctx), s, id, header, engines)
		x.searches.leave(s)
	}
	select {
	case <-s.done:
		return s.engine, s.err
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

// enter returns the search of a key, and whether the caller is to run it. It returns nil where too much is asked.
func (a *searches) enter(key searchKey, engines int) (s *search, own bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	if s := a.running[key]; s != nil && (s.over.IsZero() || now.Sub(s.over) < remembered) {
		return s, false
	}
	if now.Unix() != a.second {
		a.second, a.asked = now.Unix(), 0
	}
	if a.asked >= asksASecond {
		return nil, false
	}
	a.asked += engines
	if len(a.running) >= maxSearches {
		a.makeRoom(now)
	}
	s = &search{done: make(chan struct{})}
	a.running[key] = s
	return s, true
}

// makeRoom forgets the searches that are over.
func (a *searches) makeRoom(now time.Time) {
	for key, s := range a.running {
		if !s.over.IsZero() && now.Sub(s.over) >= remembered {
			delete(a.running, key)
		}
	}
	for key, s := range a.running {
		if len(a.running) < maxSearches {
			return
		}
		if !s.over.IsZero() {
			delete(a.running, key)
		}
	}
}

func (a *searches) leave(s *search) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s.over = time.Now()
	close(s.done)
}

// take waits for a slot until ctx ends.
func (a *searches) take(ctx context.Context) bool {
	select {
	case a.slots <- struct{}{}:
		if ctx.Err() == nil {
			return true
		}
		<-a.slots
	case <-ctx.Done():
	}
	return false
}

// decodeEngines returns those of the set, ready or not: one that fails its health probes may still know its responses.
func (x *Index) decodeEngines() []discovery.Endpoint {
	var all []discovery.Endpoint
	for _, e := range x.set.Load().Endpoints {
		if e.Role.Has(discovery.RoleDecode) && e.URL != nil {
			all = append(all, e)
		}
	}
	return all
}

// answer is what an engine says of a response. A later one counts for more.
type answer int

const (
	no answer = iota
	unknown
	refused // the client
	has
)

// run asks all engines. The first that has the response ends it.
func (x *Index) run(ctx context.Context, s *search, id string, header http.Header, engines []discovery.Endpoint) {
	ctx, stop := context.WithTimeout(ctx, searchTime)
	defer stop()
	var mu sync.Mutex
	best := no
	if x.set.Load().Version == 0 {
		best = unknown
	}
	var wg sync.WaitGroup
	for i := range engines {
		if !x.searches.take(ctx) {
			break
		}
		wg.Go(func() {
			defer func() { <-x.searches.slots }()
			a := x.ask(ctx, &engines[i], id, header)
			mu.Lock()
			defer mu.Unlock()
			if a > best {
				if best, s.engine = a, engines[i].ID; a == has {
					stop()
				}
			}
		})
	}
	wg.Wait()
	switch {
	case best == has:
		x.Learn(id, s.engine, "")
	case best == refused:
	case best == unknown || ctx.Err() != nil:
		s.engine, s.err = "", ErrUnavailable
	default:
		s.engine, s.err = "", ErrNotFound
	}
}

// ask asks one engine for a response.
func (x *Index) ask(ctx context.Context, e *discovery.Endpoint, id string, header http.Header) (a answer) {
	defer func() {
		if recover() != nil { // of a host's transport; here it would end the process
			a = unknown
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	target := *e.URL
	target.Path += "/v1/responses/" + id
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), http.NoBody)
	if err != nil {
		return no
	}
	req.Header = header.Clone() // round trippers set headers in place
	resp, err := x.send.RoundTrip(req)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return no
	case err != nil:
		return unknown
	}
	_, _ = io.CopyN(io.Discard, resp.Body, maxGetReadOn) // a short one leaves the connection usable
	_ = resp.Body.Close()
	switch code := resp.StatusCode; {
	case code/100 == 2:
		return has
	case code == http.StatusUnauthorized, code == http.StatusForbidden:
		return refused
	case code == http.StatusRequestTimeout, code == http.StatusTooManyRequests,
		code >= 500 && code != http.StatusNotImplemented:
		return unknown
	}
	return no // also a 400: an id that it could not have given, or a store that is off
}
