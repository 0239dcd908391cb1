// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/zmtp"
)

// Limits of the HTTP side's connections. Bodies are small, and nothing streams.
const (
	headerTimeout  = 5 * time.Second
	exchange       = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 16 << 10
	maxConnections = 4096
	lastWords      = time.Second
)

// gather is the pause between two snapshots, so that a burst of announcements makes a few and not one each.
const gather = 5 * time.Millisecond

// Counts are what came in since New. None of it is an error of the source's.
type Counts struct {
	Pings     int64 // ZeroMQ messages of engines that are on the list for it
	Hellos    int64 // {"type": "HELLO"}
	Malformed int64 // ZeroMQ messages that are none of the known ones
	Held      int64 // ZeroMQ messages of engines that are registered by HTTP, or that another connection speaks for
	Surplus   int64 // ZeroMQ messages of engines that were too many
	Refused   int64 // ZeroMQ connections of peers that do not speak ZMTP as a DEALER, or are too many
}

// Source is a [discovery.Source] of engines that announce themselves. All methods may be called at any time and by any
// number of goroutines; it may be watched by several sets at once.
//
// What is announced outlives Close and a later Start, until it expires.
type Source struct {
	opts     Options
	registry *registry
	handler  http.Handler

	mu  sync.Mutex
	run *running
}

// running is what Start has opened.
type running struct {
	zmq    *zmtp.Listener
	http   *http.Server
	addr   net.Addr // of http
	wg     sync.WaitGroup
	once   sync.Once
	detach func() bool
}

// Start opens the listeners that the options name, and returns once engines can announce themselves. They are closed by
// Close, or when ctx ends. The error says which of them could not be opened; then none is. Starting twice is starting
// once.
func (s *Source) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run != nil {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	r := &running{}
	var err error
	if s.opts.Listen != "" {
		if r.zmq, err = s.openZMQ(ctx); err != nil {
			return fmt.Errorf("registration: cannot listen for ZeroMQ: %w", err)
		}
	}
	if s.opts.HTTP != "" {
		if err = r.openHTTP(ctx, s.opts.HTTP, s.handler); err != nil {
			r.close()
			return fmt.Errorf("registration: cannot listen for HTTP: %w", err)
		}
	}
	s.run = r
	r.detach = context.AfterFunc(ctx, func() { _ = s.end(r) })
	return nil
}

// Close closes the listeners and waits for all that Start has started. It returns nil. Closing twice is closing once.
func (s *Source) Close() error {
	s.mu.Lock()
	r := s.run
	s.mu.Unlock()
	if r == nil {
		return nil
	}
	r.detach()
	return s.end(r)
}

func (s *Source) end(r *running) error {
	s.mu.Lock()
	defer s.mu.Unlock() // held to the end: a Start must find the addresses free
	r.close()
	if s.run == r {
		s.run = nil
	}
	return nil
}

func (r *running) openHTTP(ctx context.Context, address string, h http.Handler) error {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	var open atomic.Int64
	r.addr = ln.Addr()
	r.http = &http.Server{
		Handler: h, ReadHeaderTimeout: headerTimeout, ReadTimeout: exchange, WriteTimeout: exchange,
		IdleTimeout:    idleTimeout,
		MaxHeaderBytes: maxHeaderBytes,
		ConnState: func(conn net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				if open.Add(1) > maxConnections {
					_ = conn.Close()
				}
			case http.StateClosed, http.StateHijacked:
				open.Add(-1)
			default:
			}
		},
		ErrorLog: silent,
	}
	r.wg.Go(func() { _ = r.http.Serve(ln) }) // ends by close; what cannot be accepted now is tried again by it
	return nil
}

func (r *running) close() {
	r.once.Do(func() {
		if r.zmq != nil {
			r.zmq.Close()
		}
		if r.http != nil {
			ctx, cancel := context.WithTimeout(context.Background(), lastWords)
			defer cancel()
			if errors.Is(r.http.Shutdown(ctx), context.DeadlineExceeded) {
				_ = r.http.Close()
			}
		}
		r.wg.Wait()
	})
}

// Addr is where the ZeroMQ side listens, HTTPAddr where the HTTP side does: "" for one that is not open.
func (s *Source) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil || s.run.zmq == nil {
		return ""
	}
	return s.run.zmq.Addr().String()
}

// HTTPAddr is where the HTTP side listens, or "".
func (s *Source) HTTPAddr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil || s.run.http == nil {
		return ""
	}
	return s.run.addr.String()
}

// Handler is the HTTP side, for programs that serve it themselves, whether Start was called or not. It is no handler
// for clients of the engines: whoever can reach it has their prompts sent where he wants.
func (s *Source) Handler() http.Handler { return s.handler }

// Counts returns what came in.
func (s *Source) Counts() Counts {
	s.registry.mu.Lock()
	defer s.registry.mu.Unlock()
	return s.registry.counts
}

// Watch publishes what is announced, an empty list at first, until ctx ends. It needs no Start, and lives through
// Close.
func (s *Source) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	last := uint64(0)
	for ctx.Err() == nil {
		snap, next, changed := s.registry.view()
		if snap.Version != last {
			last = snap.Version
			publish(snap)
		}
		timer.Stop()
		var expiry <-chan time.Time
		if !next.IsZero() {
			timer.Reset(time.Until(next))
			expiry = timer.C
		}
		select {
		case <-ctx.Done():
			return nil
		case <-expiry:
			continue
		case <-changed:
		}
		timer.Reset(gather)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
	}
	return nil
}
