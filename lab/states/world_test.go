// SPDX-License-Identifier: Apache-2.0

package states

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// The limits of all runs. They differ, so that a run's clock tells which of them ended it.
const (
	leaseTime     = 10 * time.Second
	handoffLimit  = 6 * time.Second
	prefillLimit  = 9 * time.Second
	transferLimit = 4 * time.Second
	decodeLimit   = 20 * time.Second
	idleLimit     = 5 * time.Second
	writeLimit    = 3 * time.Second
	hedgeTime     = 2 * time.Second
	forever       = 10 * time.Minute // no request may take so long
)

// maxAttempts is how many pairs a request tries.
const maxAttempts = 2

// world is a gateway with its engines and clients, in one bubble.
type world struct {
	protocol *protocol
	flow     *pdflow.Flow
	next     *pdflow.Flow // that replaced flow, if one did
	mux      *pdflow.Mux
	rt       *transport.Transport
	server   *http.Server
	accept   chan net.Conn
	closing  sync.Once
	closed   chan struct{} // no more clients
	publish  chan []discovery.Endpoint
	stopSet  context.CancelFunc
	changed  chan struct{} // something happened that the driver may wait for
	draining chan struct{} // closed when the shutdown that runs beside requests has ended; nil without one
	moment   atomic.Int64  // counts what happens, since all of it may happen at one time of the clock
	ledger

	mu        sync.Mutex
	legs      []*leg // in the order in which they were begun
	endpoints []discovery.Endpoint
	clients   []*client
}

// setting is what a world may be asked for.
type setting struct {
	protocol scenario
	attempts int // 0: maxAttempts
	// how long a connection may take; 0: the transport's default. With a long time a handoff may become too old
	// meanwhile.
	connect time.Duration
}

// newWorld makes a gateway with two pairs. close ends it.
func newWorld(s setting) *world {
	w := &world{accept: make(chan net.Conn), closed: make(chan struct{}), changed: make(chan struct{}, 1),
		publish: make(chan []discovery.Endpoint)}
	w.ledger.init()
	w.protocol = newProtocol(w, s.protocol)
	w.rt = transport.New(&transport.Options{DialContext: w.dial, MaxIdlePerHost: -1,
		ConnectTimeout: s.connect})
	for _, e := range []struct {
		url  string
		role discovery.Role
	}{
		{"http://p1:1", discovery.RolePrefill}, {"http://d1:1", discovery.RoleDecode},
		{"http://p2:1", discovery.RolePrefill}, {"http://d2:1", discovery.RoleDecode},
	} {
		w.endpoints = append(w.endpoints, must(discovery.New(e.url, e.role)))
	}
	set := discovery.NewSet(discovery.SourceFunc(w.watch))
	ctx, cancel := context.WithCancel(context.Background())
	w.stopSet = cancel
	go func() { _ = set.Run(ctx) }()
	if err := set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) == 4 }); err != nil {
		panic(err)
	}
	attempts := maxAttempts
	if s.attempts > 0 {
		attempts = s.attempts
	}
	make1 := func() *pdflow.Flow {
		return must(pdflow.New(w.protocol.connector(), &counted{Picker: pick.New(set, pick.RoundRobin()), w: w},
			pdflow.WithTransport(w.rt), pdflow.WithObserver(w.observer()),
			pdflow.WithTelemetry(pdflow.Telemetry{TracerProvider: &w.spans, MeterProvider: &w.meter}),
			pdflow.WithRescue(s.protocol.rescues),
			pdflow.WithTimeouts(config.Timeouts{Prefill: prefillLimit, Handoff: handoffLimit, Decode: decodeLimit,
				Transfer: s.protocol.transfer, Idle: idleLimit, Silence: idleLimit, Write: writeLimit}),
			pdflow.WithRetry(config.Retry{MaxAttempts: attempts, Hedge: s.protocol.hedge})))
	}
	w.flow, w.next = make1(), make1()
	w.mux = must(pdflow.NewMux())
	w.route(w.flow)
	w.server = &http.Server{Handler: http.HandlerFunc(w.serve), ErrorLog: log.New(io.Discard, "", 0),
		ReadHeaderTimeout: time.Hour}
	go func() { _ = w.server.Serve(w) }()
	return w
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (w *world) route(f *pdflow.Flow) {
	if err := w.mux.SetRoutes(map[string]pdflow.Server{"": f}); err != nil {
		panic(err)
	}
}

// watch is the source of endpoints.
func (w *world) watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	version := uint64(1)
	publish(discovery.Snapshot{Version: version, Endpoints: w.endpoints})
	for {
		select {
		case list := <-w.publish:
			version++
			publish(discovery.Snapshot{Version: version, Endpoints: list})
		case <-ctx.Done():
			return nil
		}
	}
}

// vanish takes an engine out of discovery. Without an id all are back.
func (w *world) vanish(id string) {
	list := slices.Clone(w.endpoints)
	list = slices.DeleteFunc(list, func(e discovery.Endpoint) bool { return e.ID == id })
	w.publish <- list
}

// The listener of clients that come to the handler.

func (w *world) Accept() (net.Conn, error) {
	select {
	case c := <-w.accept:
		return c, nil
	case <-w.closed:
		return nil, net.ErrClosed
	}
}

func (w *world) Close() error {
	w.closing.Do(func() { close(w.closed) })
	return nil
}

func (w *world) Addr() net.Addr { return &net.TCPAddr{} }

// signal wakes the driver.
func (w *world) signal() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// waiting returns the legs that wait for the driver.
func (w *world) waiting() []*leg {
	w.mu.Lock()
	defer w.mu.Unlock()
	var list []*leg
	for _, l := range w.legs {
		if l.waits {
			list = append(list, l)
		}
	}
	return list
}

// idle waits until something happens, which only the clock can bring about.
func (w *world) idle() (happened bool) {
	timer := time.NewTimer(forever)
	defer timer.Stop()
	select {
	case <-w.changed:
		return true
	case <-timer.C:
		return false
	}
}

// finish lets all engines and clients come to their end, and checks the books. Each leg of the requests must have ended
// with its request already.
func (w *world) finish() {
	for _, c := range w.clients {
		c.give()
	}
	time.Sleep(time.Second) // a response that is through waits a moment for its prefill's end
	synctest.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if w.draining != nil {
		<-w.draining
	}
	for _, f := range []*pdflow.Flow{w.flow, w.next} {
		if n := len(f.Sessions()); n > 0 {
			w.breach("%d requests are left in flight", n)
		}
		if err := w.end(ctx, f); err != nil && w.draining == nil {
			w.breach("the shutdown at the end failed: %v", err)
		}
	}
	w.check(w)
	_ = w.server.Close()
	w.stopSet()
	_ = w.rt.Close()
	w.mu.Lock()
	legs := slices.Clone(w.legs)
	w.mu.Unlock()
	for _, l := range legs {
		l.abandon()
	}
	synctest.Wait()
}

// end shuts a flow down, which serves all requests or none. It waits for all legs or cuts them.
func (w *world) end(ctx context.Context, f *pdflow.Flow) error {
	w.ledger.mu.Lock()
	before := w.cut
	w.ledger.mu.Unlock()
	err := f.Shutdown(ctx)
	time.Sleep(time.Nanosecond) // until a host that sends the legs has seen their end, too
	w.mu.Lock()
	for _, l := range w.legs {
		if l.host != "" && l.ended.IsZero() {
			w.breach("%s's leg is alive at %s after the shutdown", l.role, l.at)
		}
	}
	w.mu.Unlock()
	w.ledger.mu.Lock()
	cut := w.cut - before
	w.ledger.mu.Unlock()
	if err == nil && cut > 0 {
		w.breach("a shutdown that had time cut %d legs", cut)
	}
	return err
}

// bubble runs f in a bubble of its own and returns the rules that were broken.
func bubble(t *testing.T, s setting, f func(w *world)) (breaches []string) {
	synctest.Test(t, func(*testing.T) {
		w := newWorld(s)
		synctest.Wait()
		f(w)
		w.finish()
		breaches = w.breaches
	})
	return breaches
}

func (w *world) breach(format string, args ...any) {
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	w.breaches = append(w.breaches, fmt.Sprintf(format, args...))
}
