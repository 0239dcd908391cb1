// SPDX-License-Identifier: Apache-2.0

// Package server runs one life of a simulated engine: its HTTP server, the requests that it serves, and its end.
package server

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/kvevents"
)

// Config is what a node needs to run an engine and to serve it.
type Config struct {
	Core             core.Config
	API              api.Engine
	Extra            map[string]string
	Listen           string              // the HTTP address
	KeepAlive        time.Duration       // of idle HTTP connections
	ExitDelay        time.Duration       // a dead engine still answers 503 and 500 for that long
	HandshakeTimeout time.Duration       // bounds the release of a handoff that a refused request names
	APIKey           string              // see allowed; "": none
	SGLang           bool                // the key guards what SGLang's does
	APIServers       int                 // processes behind the port; not above 1: one
	KVEvents         *kvevents.Publisher // the node's from here on, whether it starts or not; nil: none
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

	Addr    net.Addr // also while the port is closed
	server  *http.Server
	serving sync.WaitGroup // at a listener
	conns   sync.WaitGroup // HTTP connections
	stopMu  sync.Mutex     // one stop at a time
	gone    bool           // everything has ended

	portMu   sync.Mutex   // one change of the port at a time
	ln       net.Listener // nil while the port is closed
	portGone bool         // the port is closed for good

	mu       sync.Mutex
	open     map[net.Conn]http.ConnState
	requests map[*handled]struct{}
	ending   error // why no request may start any more
	stopped  bool  // no stop may be started in the background any more
	stopping sync.WaitGroup
}

// handled is one HTTP request that is being served.
type handled struct{ cancel context.CancelCauseFunc }

// Start starts a life of an engine. It serves when Start returns.
func Start(cfg Config) (*Node, error) {
	n := &Node{cfg: cfg, started: time.Now(), open: map[net.Conn]http.ConnState{}, requests: map[*handled]struct{}{}}
	if cfg.KVEvents != nil {
		cfg.Core.Events = cfg.KVEvents
	}
	n.Core = core.New(cfg.Core, n.die)
	ln, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		n.closeKVEvents()
		return nil, fmt.Errorf("enginesim: %w", err)
	}
	n.Addr = ln.Addr()
	n.media = newMedia(cfg.Extra, n.Core.Stats, n.Addr)
	n.cfg.API.Media = n.media.encode
	if n.Conn, err = cfg.Connect(n.Core, n); err != nil {
		_ = ln.Close()
		n.closeKVEvents()
		return nil, fmt.Errorf("enginesim: %w", err)
	}
	n.server = &http.Server{
		Handler: n, IdleTimeout: cfg.KeepAlive, ReadHeaderTimeout: 30 * time.Second,
		ConnState: n.connState, ConnContext: n.accepted, ErrorLog: core.Silent(),
	}
	n.serveAt(ln)
	return n, nil
}

// accepted is a connection that one of the processes behind the port has.
type accepted struct {
	net.Conn
	process int
}

type acceptedKey struct{}

// accepted gives a new connection to one of the processes behind the port, as the kernel does.
func (n *Node) accepted(ctx context.Context, conn net.Conn) context.Context {
	a := &accepted{Conn: conn}
	if n.cfg.APIServers > 1 {
		a.process = rand.IntN(n.cfg.APIServers)
	}
	return context.WithValue(ctx, acceptedKey{}, a)
}

func connOf(ctx context.Context) *accepted {
	a, _ := ctx.Value(acceptedKey{}).(*accepted)
	return a
}

// ProcessOf returns which of the processes behind the port has a request.
func ProcessOf(r *http.Request) int {
	if a := connOf(r.Context()); a != nil {
		return a.process
	}
	return 0
}

// serveAt serves at a listener until that is closed.
func (n *Node) serveAt(ln net.Listener) {
	n.ln = ln
	n.serving.Go(func() { _ = n.server.Serve(ln) })
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
	if n.open[conn] = state; state == http.StateClosed || state == http.StateHijacked {
		delete(n.open, conn)
	}
}

// responding reports whether a connection is in the middle of a response.
func (n *Node) responding() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, state := range n.open {
		if state == http.StateActive {
			return true
		}
	}
	return false
}

// until waits for what is rare enough to look for it again and again.
func until(ctx context.Context, done func() bool) error {
	for !done() {
		if err := core.Sleep(ctx, time.Millisecond); err != nil {
			return err
		}
	}
	return nil
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
}

// InFlight is how many requests are being served.
func (n *Node) InFlight() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.requests)
}

// WaitIdle waits until no request is served.
func (n *Node) WaitIdle(ctx context.Context) error {
	if err := until(ctx, func() bool { return n.InFlight() == 0 }); err != nil {
		return fmt.Errorf("enginesim: %d requests still run: %w", n.InFlight(), err)
	}
	return nil
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
	n.portMu.Lock()
	n.portGone = true
	n.closePort()
	n.portMu.Unlock()
	if grace > 0 {
		ctx, stop := context.WithTimeout(context.Background(), grace)
		_ = until(ctx, func() bool { return !n.responding() })
		stop()
		n.end(core.ErrKilled)
	}
	n.Core.Gate.End()
	_ = n.server.Close()
	n.serving.Wait()
	n.conns.Wait()
	n.closeKVEvents()
	n.Conn.Close()
	n.Core.Close()
}

func (n *Node) closeKVEvents() {
	if n.cfg.KVEvents != nil {
		n.cfg.KVEvents.Close()
	}
}

// KVEvents publishes the events of the engine's blocks; nil: nobody does.
func (n *Node) KVEvents() *kvevents.Publisher { return n.cfg.KVEvents }

// Refuse closes the port and its connections, or opens the port again.
func (n *Node) Refuse(refuse bool) {
	n.portMu.Lock()
	defer n.portMu.Unlock()
	if !refuse {
		if n.ln == nil && !n.portGone {
			_ = Again(func() error {
				ln, err := net.Listen("tcp", n.Addr.String())
				if err == nil {
					n.serveAt(ln)
				}
				return err
			})
		}
		return
	}
	n.closePort()
	n.mu.Lock()
	defer n.mu.Unlock()
	for conn := range n.open {
		_ = conn.Close()
	}
}

// closePort closes the port, unless it is closed. The caller holds its lock.
func (n *Node) closePort() {
	if n.ln != nil {
		_ = n.ln.Close()
		n.ln = nil
	}
}

// Again calls listen until its port is free. The system may have given the port of an engine that is dead to a client's
// connection of another program.
func Again(listen func() error) error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := listen()
		if !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			return err
		}
	}
}

// Frozen reports whether the engine is frozen.
func (n *Node) Frozen() bool { return n.Core.Gate.Shut() }

// Pass waits while the engine is frozen. It returns false once the engine has ended.
func (n *Node) Pass() bool { return n.Core.Gate.Pass() }

// Freeze stops the engine as SIGSTOP does, or lets it go on.
func (n *Node) Freeze(frozen bool) {
	n.Core.Freeze(frozen)
	if n.cfg.KVEvents != nil {
		n.cfg.KVEvents.Freeze(frozen)
	}
	n.Conn.Freeze(frozen)
}
