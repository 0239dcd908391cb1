// SPDX-License-Identifier: Apache-2.0

// Package server runs one life of a simulated engine: its HTTP server, the requests that it serves, and its end.
package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// Config is what a node needs to run an engine and to serve it.
type Config struct {
	Core             core.Config
	API              api.Engine
	Extra            map[string]string
	Listen           string        // the HTTP address
	KeepAlive        time.Duration // of idle HTTP connections
	ExitDelay        time.Duration // a dead engine still answers 503 and 500 for that long
	HandshakeTimeout time.Duration // bounds the release of a handoff that a refused request names
	// Connect makes the connector.
	Connect func(*core.Core, *Node) (core.Connector, error)
	// Received is called with each POST request.
	Received func(r *http.Request, body []byte)
	// Strike returns the fault that strikes a request, or nil.
	Strike func(path string, body []byte) *Effect
}

// Node is one life of an engine, from its start to its kill, death or termination. A restart is a new node on the same
// ports.
type Node struct {
	cfg     Config
	Core    *core.Core
	Conn    core.Connector
	media   *media
	started time.Time

	Ln     *portListener
	server *http.Server
	conns  sync.WaitGroup // HTTP connections
	served chan struct{}  // closed when the listener's loop has ended
	stopMu sync.Mutex     // one stop at a time
	gone   bool           // everything has ended

	mu       sync.Mutex
	open     map[net.Conn]http.ConnState
	active   int           // connections that are in the middle of a response
	quiet    chan struct{} // closed and replaced when there is none
	requests map[*handled]struct{}
	idle     chan struct{} // closed and replaced when the last request ends
	ending   error         // why no request may start any more
	stopped  bool          // no stop may be started in the background any more
	stopping sync.WaitGroup
}

// handled is one HTTP request that is being served.
type handled struct{ cancel context.CancelCauseFunc }

// Start starts a life of an engine. It serves when Start returns.
func Start(cfg Config) (*Node, error) {
	n := &Node{
		cfg: cfg, started: time.Now(), served: make(chan struct{}), open: map[net.Conn]http.ConnState{},
		quiet: make(chan struct{}), requests: map[*handled]struct{}{}, idle: make(chan struct{}),
	}
	n.Core = core.New(cfg.Core, n.die)
	ln, err := listenPort(cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("enginesim: %w", err)
	}
	n.Ln = ln
	n.media = newMedia(cfg.Extra, n.Core.Stats, ln.Addr())
	n.cfg.API.Media = n.media.encode
	if n.Conn, err = cfg.Connect(n.Core, n); err != nil {
		_ = ln.Close()
		return nil, fmt.Errorf("enginesim: %w", err)
	}
	n.server = &http.Server{
		Handler: n, IdleTimeout: cfg.KeepAlive, ReadHeaderTimeout: 30 * time.Second,
		ConnState: n.connState, ErrorLog: core.Silent(),
	}
	go func() {
		defer close(n.served)
		_ = n.server.Serve(ln)
	}()
	return n, nil
}

func (n *Node) connState(conn net.Conn, state http.ConnState) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch state {
	case http.StateNew:
		n.conns.Add(1)
	case http.StateClosed, http.StateHijacked:
		n.conns.Done()
	}
	before := n.open[conn]
	if n.open[conn] = state; state == http.StateClosed || state == http.StateHijacked {
		delete(n.open, conn)
	}
	switch {
	case before != http.StateActive && state == http.StateActive:
		n.active++
	case before == http.StateActive && state != http.StateActive:
		if n.active--; n.active == 0 {
			close(n.quiet)
			n.quiet = make(chan struct{})
		}
	}
}

// waitResponses waits until no connection is in the middle of a response.
func (n *Node) waitResponses(limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		n.mu.Lock()
		active, quiet := n.active, n.quiet
		n.mu.Unlock()
		if active == 0 {
			return
		}
		select {
		case <-quiet:
		case <-timer.C:
			return
		}
	}
}

// begin registers a request; finish takes it out again.
func (n *Node) begin(ctx context.Context) (context.Context, *handled, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ending != nil {
		return nil, nil, n.ending
	}
	ctx, cancel := context.WithCancelCause(ctx)
	f := &handled{cancel: cancel}
	n.requests[f] = struct{}{}
	return ctx, f, nil
}

func (n *Node) finish(f *handled) {
	f.cancel(nil)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.requests, f)
	if len(n.requests) == 0 {
		close(n.idle)
		n.idle = make(chan struct{})
	}
}

// InFlight is how many requests are being served.
func (n *Node) InFlight() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.requests)
}

// WaitIdle waits until no request is served.
func (n *Node) WaitIdle(ctx context.Context) error {
	for {
		n.mu.Lock()
		left, idle := len(n.requests), n.idle
		n.mu.Unlock()
		if left == 0 {
			return nil
		}
		select {
		case <-idle:
		case <-ctx.Done():
			return fmt.Errorf("enginesim: %d requests still run: %w", left, context.Cause(ctx))
		}
	}
}

// end cancels all requests for a reason, and lets no new one start.
func (n *Node) end(why error) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ending != nil && !errors.Is(why, core.ErrKilled) {
		return false
	}
	n.ending = why
	for f := range n.requests {
		f.cancel(why)
	}
	return true
}

// Ended says why the engine takes no new request, or nil.
func (n *Node) Ended() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ending
}

// die ends the engine after an error in its core: all requests fail, the server answers with errors for ExitDelay, then
// its port closes.
func (n *Node) die() {
	if !n.end(core.ErrCoreDead) {
		return
	}
	n.background(func() {
		wait := time.NewTimer(n.cfg.ExitDelay)
		defer wait.Stop()
		select {
		case <-wait.C:
		case <-n.Core.Gate.Ended:
		}
		n.stop(time.Second)
	})
}

// killSoon kills the engine from within one of its own requests.
func (n *Node) killSoon() {
	n.end(core.ErrKilled)
	n.background(func() { n.stop(0) })
}

// terminateSoon terminates the engine from within one of its own requests.
func (n *Node) terminateSoon() {
	n.end(core.ErrTerminated)
	n.background(func() { n.stop(5 * time.Second) })
}

// background does work that may outlive the request that causes it.
func (n *Node) background(work func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.stopped {
		n.stopping.Go(work)
	}
}

// Kill ends everything at once; connections break.
func (n *Node) Kill() {
	n.end(core.ErrKilled)
	n.settle(0)
}

// Terminate is SIGTERM: running requests are aborted and answered, then the port closes.
func (n *Node) Terminate() {
	n.Freeze(false)
	n.end(core.ErrTerminated)
	n.settle(5 * time.Second)
}

func (n *Node) settle(grace time.Duration) {
	n.mu.Lock()
	n.stopped = true
	n.mu.Unlock()
	n.stop(grace)
	n.stopping.Wait()
}

// stop closes the port, gives running responses some time, and ends the rest.
func (n *Node) stop(grace time.Duration) {
	n.stopMu.Lock()
	defer n.stopMu.Unlock()
	if n.gone {
		return
	}
	n.gone = true
	_ = n.Ln.Close()
	if grace > 0 {
		n.waitResponses(grace)
		n.end(core.ErrKilled)
	}
	n.Core.Gate.End()
	_ = n.server.Close()
	<-n.served
	n.conns.Wait()
	n.Conn.Close()
	n.Core.Close()
}

// Refuse closes the port and its connections, or opens the port again.
func (n *Node) Refuse(refuse bool) {
	if err := n.Ln.shut(refuse); err != nil || !refuse {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for conn := range n.open {
		_ = conn.Close()
	}
}

// Frozen reports whether the engine is frozen.
func (n *Node) Frozen() bool { return n.Core.Gate.Shut() }

// Pass waits while the engine is frozen. It returns false once the engine has ended.
func (n *Node) Pass() bool { return n.Core.Gate.Pass() }

// Freeze stops the engine as SIGSTOP does, or lets it go on.
func (n *Node) Freeze(frozen bool) {
	n.Core.Freeze(frozen)
	n.Conn.Freeze(frozen)
}
