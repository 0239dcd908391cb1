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
	"github.com/pdkit/pdkit/internal/relisten"
	"github.com/pdkit/pdkit/internal/zmtp"
)

// Limits of the HTTP side's connections. Bodies are small, and no response streams.
const (
	headerTimeout  = 5 * time.Second
	exchange       = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 16 << 10
	maxConnections = 4096
	lastWords      = time.Second
)

// gather is the pause between two snapshots, so that a burst of announcements makes few snapshots.
const gather = 5 * time.Millisecond

// Counts are numbers of messages and connections since New. None of them is an error of the source.
type Counts struct {
	Pings     int64 // ZeroMQ messages that put an engine on the list or kept it there
	Hellos    int64 // {"type": "HELLO"}
	Malformed int64 // ZeroMQ messages of no known form
	Held      int64 // ZeroMQ messages about engines that are registered by HTTP, or that another connection owns
	Surplus   int64 // ZeroMQ messages about engines beyond MaxEndpoints or a connection's limit
	Refused   int64 // ZeroMQ connections of peers that do not speak ZMTP as a DEALER, or beyond the limit
}

// Source is a [discovery.Source] for engines that announce themselves. All methods are safe for concurrent use at any
// time. Several sets may watch it at once.
//
// Announced engines stay on the list over Close and a later Start, until they expire.
type Source struct {
	opts     Options
	registry *registry
	handler  http.Handler

	mu  sync.Mutex
	run *running
}

// running holds what Start has opened.
type running struct {
	zmq    *zmtp.Listener
	http   *http.Server
	ln     *relisten.Listener // of http
	wg     sync.WaitGroup
	once   sync.Once
	detach func() bool
}

// Start opens the listeners that the options name, and returns when engines can announce themselves. Close closes them,
// and so does the end of ctx. If one cannot be opened, Start opens none, and the error names it. A second Start without
// Close does nothing.
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

// Close closes the listeners and waits for all goroutines of Start. It returns nil. A second Close does nothing.
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
	defer s.mu.Unlock() // until the end: a Start must find the addresses free
	r.close()
	if s.run == r {
		s.run = nil
	}
	return nil
}

func (r *running) openHTTP(ctx context.Context, address string, h http.Handler) error {
	ln, err := relisten.Listen(ctx, address)
	if err != nil {
		return err
	}
	var open atomic.Int64
	r.ln = ln
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
	r.wg.Go(func() { _ = r.http.Serve(ln) }) // ends by close only, as ln.Accept does
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

// Addr returns the address of the ZeroMQ listener, or "" if it is not open.
func (s *Source) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil || s.run.zmq == nil {
		return ""
	}
	return s.run.zmq.Addr().String()
}

// HTTPAddr returns the address of the HTTP listener, or "" if it is not open.
func (s *Source) HTTPAddr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil || s.run.http == nil {
		return ""
	}
	return s.run.ln.Addr().String()
}

// Err returns why engines cannot announce themselves at present; nil if they can, and where Start has opened nothing. A
// listener that fails binds its address again by itself.
func (s *Source) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil {
		return nil
	}
	if s.run.zmq != nil {
		if err := s.run.zmq.Err(); err != nil {
			return fmt.Errorf("registration: ZeroMQ: %w", err)
		}
	}
	if s.run.ln != nil {
		if err := s.run.ln.Err(); err != nil {
			return fmt.Errorf("registration: HTTP: %w", err)
		}
	}
	return nil
}

// Handler returns the HTTP side, for programs that serve it themselves, with or without Start. Do not expose it to
// clients of the engines: whoever reaches it can have their prompts sent to himself.
func (s *Source) Handler() http.Handler { return s.handler }

// Counts returns the counters.
func (s *Source) Counts() Counts {
	s.registry.mu.Lock()
	defer s.registry.mu.Unlock()
	return s.registry.counts
}

// Watch publishes the announced engines until ctx ends; the first list may be empty. It needs no Start, and goes on
// after Close.
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
