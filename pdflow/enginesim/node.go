// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"
)

// serverConfig is what a node needs to run an engine and to serve it.
type serverConfig struct {
	Core             coreConfig
	API              target
	Extra            map[string]string
	Listen           string        // the HTTP address
	KeepAlive        time.Duration // of idle HTTP connections
	ExitDelay        time.Duration // a dead engine still answers 503 and 500 for that long
	HandshakeTimeout time.Duration // bounds the release of a handoff that a refused request names
	EventsPerWrite   int           // of a stream
	// Connect makes the connector.
	Connect func(*core, *node) (connector, error)
	// Received is called with each POST request.
	Received func(r *http.Request, body []byte)
	// Strike returns the fault that strikes a request, or nil.
	Strike func(path string, body []byte) *effect
}

// node is one life of an engine: from a start to a kill, a death or an end. Restart begins another on the same ports.
type node struct {
	cfg     serverConfig
	core    *core
	conn    connector
	media   *media
	started time.Time

	ln     *portListener
	server *http.Server
	conns  sync.WaitGroup // HTTP connections
	served chan struct{}  // closed when the listener's loop has ended
	stopMu sync.Mutex     // one stop at a time
	gone   bool           // everything has ended

	mu        sync.Mutex
	open      map[net.Conn]http.ConnState
	active    int           // connections that are in the middle of a response
	quiet     chan struct{} // closed and replaced when there is none
	exchanges map[*exchange]struct{}
	idle      chan struct{} // closed and replaced when the last exchange ends
	ending    error         // why no exchange may start any more
	stopped   bool          // no stop may be started in the background any more
	stopping  sync.WaitGroup
}

// exchange is one HTTP request that is being served.
type exchange struct{ cancel context.CancelCauseFunc }

func startNode(cfg serverConfig) (*node, error) {
	n := &node{
		cfg: cfg, started: time.Now(), served: make(chan struct{}), open: map[net.Conn]http.ConnState{},
		quiet: make(chan struct{}), exchanges: map[*exchange]struct{}{}, idle: make(chan struct{}),
	}
	n.core = newCore(cfg.Core, n.die)
	ln, err := listenPort(cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("enginesim: %w", err)
	}
	n.ln = ln
	n.media = newMedia(cfg.Extra, n.core.stats, ln.Addr())
	n.cfg.API.media = n.media.encode
	if n.conn, err = cfg.Connect(n.core, n); err != nil {
		_ = ln.Close()
		return nil, fmt.Errorf("enginesim: %w", err)
	}
	n.server = &http.Server{
		Handler: n, IdleTimeout: cfg.KeepAlive, ReadHeaderTimeout: 30 * time.Second,
		ConnState: n.connState, ErrorLog: silent(),
	}
	go func() {
		defer close(n.served)
		_ = n.server.Serve(ln)
	}()
	return n, nil
}

func (n *node) connState(conn net.Conn, state http.ConnState) {
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
func (n *node) waitResponses(limit time.Duration) {
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
func (n *node) begin(ctx context.Context) (context.Context, *exchange, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ending != nil {
		return nil, nil, n.ending
	}
	ctx, cancel := context.WithCancelCause(ctx)
	f := &exchange{cancel: cancel}
	n.exchanges[f] = struct{}{}
	return ctx, f, nil
}

func (n *node) finish(f *exchange) {
	f.cancel(nil)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.exchanges, f)
	if len(n.exchanges) == 0 {
		close(n.idle)
		n.idle = make(chan struct{})
	}
}

func (n *node) inFlight() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.exchanges)
}

// waitIdle waits until no request is served.
func (n *node) waitIdle(ctx context.Context) error {
	for {
		n.mu.Lock()
		left, idle := len(n.exchanges), n.idle
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

// end cancels all exchanges for a reason, and lets no new one start.
func (n *node) end(why error) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ending != nil && !errors.Is(why, errKilled) {
		return false
	}
	n.ending = why
	for f := range n.exchanges {
		f.cancel(why)
	}
	return true
}

func (n *node) ended() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ending
}

// die is what an error in the engine core does: everything that runs fails, the
// server says so for a moment, then its port closes.
func (n *node) die() {
	if !n.end(errCoreDead) {
		return
	}
	n.background(func() {
		wait := time.NewTimer(n.cfg.ExitDelay)
		defer wait.Stop()
		select {
		case <-wait.C:
		case <-n.core.gate.ended:
		}
		n.stop(time.Second)
	})
}

// killSoon kills the engine from within one of its own requests.
func (n *node) killSoon() {
	n.end(errKilled)
	n.background(func() { n.stop(0) })
}

// terminateSoon terminates the engine from within one of its own requests.
func (n *node) terminateSoon() {
	n.end(errTerminated)
	n.background(func() { n.stop(5 * time.Second) })
}

// background does work that may outlive the request that causes it.
func (n *node) background(work func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.stopped {
		n.stopping.Go(work)
	}
}

// kill ends everything at once; connections break.
func (n *node) kill() {
	n.end(errKilled)
	n.settle(0)
}

// terminate is SIGTERM: running requests are aborted and answered, then the port
// closes.
func (n *node) terminate() {
	n.freeze(false)
	n.end(errTerminated)
	n.settle(5 * time.Second)
}

func (n *node) settle(grace time.Duration) {
	n.mu.Lock()
	n.stopped = true
	n.mu.Unlock()
	n.stop(grace)
	n.stopping.Wait()
}

// stop closes the port, gives running answers some time, and ends the rest.
func (n *node) stop(grace time.Duration) {
	n.stopMu.Lock()
	defer n.stopMu.Unlock()
	if n.gone {
		return
	}
	n.gone = true
	_ = n.ln.Close()
	if grace > 0 {
		n.waitResponses(grace)
		n.end(errKilled)
	}
	n.core.gate.end()
	_ = n.server.Close()
	<-n.served
	n.conns.Wait()
	n.conn.close()
	n.core.close()
}

// refuse closes the port and its connections, or opens the port again.
func (n *node) refuse(refuse bool) {
	if err := n.ln.shut(refuse); err != nil || !refuse {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for conn := range n.open {
		_ = conn.Close()
	}
}

func (n *node) frozen() bool { return n.core.gate.shut() }

func (n *node) pass() bool { return n.core.gate.pass() }

func (n *node) freeze(frozen bool) {
	n.core.freeze(frozen)
	n.conn.freeze(frozen)
}
