// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// engine is one engine that is subscribed to.
type engine struct {
	s    *Subscriber
	e    discovery.Endpoint
	ctx  context.Context
	stop context.CancelFunc
	done chan struct{}

	mu      sync.Mutex
	replays map[int]string       // rank → HOST:PORT
	bound   map[int]*boundStream // of connections to Options.Listen
	serving sync.WaitGroup       // these connections
	ended   bool                 // no connection begins any more
}

// follow starts and stops subscriptions, so that they are those of a list.
func (s *Subscriber) follow(ctx context.Context, endpoints []discovery.Endpoint, running *sync.WaitGroup) {
	wanted := map[string]discovery.Endpoint{}
	for _, e := range endpoints {
		usable := e.URL != nil && e.Phase != discovery.PhaseDraining && e.Attribute(attrEvents) != off &&
			(e.Role.Has(discovery.RolePrefill) || e.Role.Has(discovery.RoleDecode))
		_, there := s.engines[e.ID]
		if _, twice := wanted[e.ID]; usable && !twice && (there || e.Phase == discovery.PhaseReady) {
			wanted[e.ID] = e
		}
	}
	s.mu.Lock()
	var gone []*engine
	for id, en := range s.engines {
		if e, ok := wanted[id]; ok && en.same(e) {
			delete(wanted, id)
			continue
		}
		gone = append(gone, en)
		delete(s.engines, id)
	}
	s.mu.Unlock()
	for _, en := range gone {
		en.stop()
	}
	for _, en := range gone {
		<-en.done
		en.end()
		s.sink.Forget(en.e.ID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, e := range wanted {
		en := &engine{s: s, e: e, done: make(chan struct{}), replays: map[int]string{}, bound: map[int]*boundStream{}}
		en.ctx, en.stop = context.WithCancel(ctx) //nolint:fatcontext // each engine has one of its own
		s.engines[id] = en
		running.Go(func() {
			defer close(en.done)
			en.run()
		})
	}
}

// same reports whether the engine is where it was.
func (en *engine) same(e discovery.Endpoint) bool {
	for _, name := range []string{attrEvents, attrReplay, attrLoad, attrSize, attrSizeLocal, attrStartRank} {
		if en.e.Attribute(name) != e.Attribute(name) {
			return false
		}
	}
	return en.e.URL.String() == e.URL.String()
}

// end waits for the engine's connections to Options.Listen.
func (en *engine) end() {
	en.mu.Lock()
	en.ended = true
	en.mu.Unlock()
	en.serving.Wait()
}

func (en *engine) source(rank int) Source {
	model := en.s.o.Model
	if model == "" {
		model = en.e.Model
	}
	return Source{Engine: en.e.ID, Model: model, Rank: rank}
}

// run finds out where the engine publishes, and runs a stream for each rank.
func (en *engine) run() {
	t := &en.s.t
	pause := t.firstBackoff
	for en.ctx.Err() == nil {
		found, asked, err := en.find()
		if len(found) > 0 {
			pause = t.firstBackoff
			en.streams(found, asked)
			continue
		}
		if err == nil && !asked {
			<-en.ctx.Done() // the entry says nothing, and nobody is to be asked
			return
		}
		if en.ctx.Err() == nil {
			en.s.observe(en.source(0), "find", err)
		}
		if wait(en.ctx, jitter(pause)) != nil {
			return
		}
		pause = min(2*pause, t.askAgain)
	}
}

// streams runs the streams until the engine ends, or says that it publishes elsewhere.
func (en *engine) streams(found []address, asked bool) {
	ctx, stop := context.WithCancel(en.ctx)
	var running sync.WaitGroup
	defer en.s.loads.forget(en.e.ID)
	defer running.Wait()
	defer stop()
	en.mu.Lock()
	clear(en.replays)
	for _, a := range found {
		en.replays[a.rank] = a.replay
	}
	en.mu.Unlock()
	for _, a := range found {
		if strings.Contains(a.events, "://") {
			running.Go(func() { (&poller{en: en, url: a.events, ranks: map[int]*polled{}}).run(ctx) })
		} else if a.events != "" {
			running.Go(func() { en.stream(a.rank).connect(ctx, a.events) })
		}
	}
	en.followLoads(ctx, found, &running)
	for {
		if !asked {
			<-ctx.Done()
			return
		}
		if wait(ctx, jitter(en.s.t.askAgain)) != nil {
			return
		}
		now, _, err := en.find()
		if nowhere := errors.Is(err, errNoEvents); nowhere || len(now) > 0 && !slices.Equal(now, found) {
			stop()
			running.Wait()
			en.s.sink.Forget(en.e.ID)
			return
		}
	}
}

func (en *engine) stream(rank int) *stream {
	return &stream{s: en.s, src: en.source(rank), replayAt: func() string {
		en.mu.Lock()
		defer en.mu.Unlock()
		return en.replays[rank]
	}}
}

// find returns where the engine publishes, and whether it was asked. Addresses without events are of sockets that
// connect. The entry may name the replay or the load alone.
func (en *engine) find() (found []address, asked bool, err error) {
	entry, err := ofAttributes(en.e)
	if err != nil || len(entry) > 0 && entry[0].events != "" || en.s.o.Client == nil {
		return entry, false, err
	}
	if found, err = en.ask(); err != nil {
		if len(entry) > 0 && errors.Is(err, errNoEvents) {
			return entry, false, nil
		}
		return nil, true, err
	}
	slices.SortFunc(found, func(a, b address) int { return a.rank - b.rank })
	for i := range found {
		for _, a := range entry {
			if a.rank == found[i].rank {
				found[i].replay = cmp.Or(found[i].replay, a.replay)
				found[i].load = cmp.Or(a.load, found[i].load)
			}
		}
	}
	return found, true, nil
}

// ask asks the engine where it publishes.
func (en *engine) ask() ([]address, error) {
	host := en.e.Host()
	body, status, err := en.get("/kv_event_sources")
	if err == nil && status == http.StatusOK {
		return ofVLLM(body, host, en.s.listen.has)
	}
	if err == nil && status == http.StatusNotFound {
		if body, status, err = en.get("/server_info"); err == nil && status == http.StatusOK {
			return ofSGLang(body, host)
		}
	}
	switch {
	case err != nil:
		return nil, err
	case status == http.StatusNotFound:
		return nil, errNoEvents
	}
	return nil, errBadStatus
}

// maxBody bounds a response, in bytes. SGLang's /server_info holds all its arguments and its state.
const maxBody = 2 << 20

func (en *engine) get(path string) (body []byte, status int, err error) {
	ctx, cancel := context.WithTimeout(en.ctx, en.s.t.ask)
	defer cancel()
	u := *en.e.URL
	u.Path, u.RawPath = strings.TrimRight(u.Path, "/")+path, ""
	resp, err := en.s.ask(ctx, en.s.o.Client, http.MethodGet, &u)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err == nil && len(body) > maxBody {
		err = errTooMuch
	}
	return body, resp.StatusCode, err
}

// ask sends a request without a body.
func (s *Subscriber) ask(ctx context.Context, client http.RoundTripper, method string, u *url.URL) (
	resp *http.Response, err error) {
	defer func() {
		if recover() != nil {
			err = plainError("the client panicked")
		}
	}()
	r := &http.Request{Method: method, URL: u, Host: u.Host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"User-Agent": {"pdkit-kvevents"}}}
	return client.RoundTrip(r.WithContext(ctx))
}

// wait waits, and returns ctx's error if it ends first.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// jitter spreads what would come at the same time from many engines.
func jitter(d time.Duration) time.Duration {
	return d/2 + rand.N(d/2+1) //nolint:gosec // spreads, guards nothing
}
