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

// node is one life of an engine: from a start to a kill, a death or an end.
// Restart begins another, on the same ports.
type node struct {
	cfg      Config
	engine   *Engine
	engineID string
	core     *core
	conn     connector
	media    *media
	target   target
	started  time.Time

	ln     *doorListener
	server *http.Server
	conns  sync.WaitGroup // HTTP connections
	served chan struct{}  // closed when the listener's loop has ended
	stopMu sync.Mutex     // one stop at a time
	gone   bool           // everything has ended

	mu      sync.Mutex
	open    map[net.Conn]http.ConnState
	active  int           // connections amid an answer
	quiet   chan struct{} // closed and replaced when there is none
	flights map[*flight]struct{}
	idle    chan struct{} // closed and replaced when the last flight lands
	ending  error         // why no new flight may start
	stopped bool          // nobody may start to fall any more
	falling sync.WaitGroup
}

// flight is one HTTP request that is being served.
type flight struct{ cancel context.CancelCauseFunc }

func startNode(e *Engine, cfg Config) (*node, error) {
	n := &node{
		cfg: cfg, engine: e, engineID: cfg.EngineID, started: time.Now(),
		served: make(chan struct{}), open: map[net.Conn]http.ConnState{}, quiet: make(chan struct{}), flights: map[*flight]struct{}{}, idle: make(chan struct{}),
	}
	if n.engineID == "" {
		n.engineID = newUUID()
	}
	n.core = newCore(cfg.core(), n.die)
	ln, err := openDoor(cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("enginesim: %w", err)
	}
	n.ln = ln
	n.media = newMedia(cfg.Extra, n.core.stats, ln.Addr())
	n.target = target{cfg.Model, cfg.MaxModelLen, cfg.DefaultMaxTokens, n.media.encode}
	if n.conn, err = starters()[cfg.Connector](n.host()); err != nil {
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

// waitQuiet waits until no connection is amid an answer.
func (n *node) waitQuiet(limit time.Duration) {
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

// takeOff registers a request; land takes it out again.
func (n *node) takeOff(ctx context.Context) (context.Context, *flight, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ending != nil {
		return nil, nil, n.ending
	}
	ctx, cancel := context.WithCancelCause(ctx)
	f := &flight{cancel: cancel}
	n.flights[f] = struct{}{}
	return ctx, f, nil
}

func (n *node) land(f *flight) {
	f.cancel(nil)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.flights, f)
	if len(n.flights) == 0 {
		close(n.idle)
		n.idle = make(chan struct{})
	}
}

func (n *node) inFlight() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.flights)
}

// waitIdle waits until no request is served.
func (n *node) waitIdle(ctx context.Context) error {
	for {
		n.mu.Lock()
		left, idle := len(n.flights), n.idle
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

// end cancels all flights for a reason, and lets no new one start.
func (n *node) end(why error) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ending != nil && !errors.Is(why, errKilled) {
		return false
	}
	n.ending = why
	for f := range n.flights {
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
	n.later(func() {
		wait := time.NewTimer(n.cfg.ExitDelay)
		defer wait.Stop()
		select {
		case <-wait.C:
		case <-n.core.gate.ended:
		}
		n.stop(time.Second)
	})
}

// fall kills the engine from within one of its own requests.
func (n *node) fall() {
	n.end(errKilled)
	n.later(func() { n.stop(0) })
}

// bow terminates the engine from within one of its own requests.
func (n *node) bow() {
	n.end(errTerminated)
	n.later(func() { n.stop(5 * time.Second) })
}

// later does work that outlives the request that causes it.
func (n *node) later(work func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.stopped {
		n.falling.Go(work)
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
	n.falling.Wait()
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
		n.waitQuiet(grace)
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

// host is what the engine's protocol may know of it.
func (n *node) host() *host {
	return &host{
		id: n.engineID, model: n.cfg.Model, role: n.cfg.KVRole, extra: n.cfg.Extra, sideChannel: n.cfg.SideChannel,
		handshake: n.cfg.HandshakeTimeout, keepAlive: n.cfg.KeepAlive, maxModelLen: n.cfg.MaxModelLen, core: n.core, life: n,
	}
}

func (n *node) freeze(frozen bool) {
	n.core.freeze(frozen)
	n.conn.freeze(frozen)
}
