// SPDX-License-Identifier: Apache-2.0

// Package relisten has a TCP listener that binds its address again when its socket dies.
package relisten

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"
)

const (
	firstPause = 5 * time.Millisecond
	maxPause   = time.Second
)

// Listener is a [net.Listener] whose Accept fails only after Close. It may be used concurrently.
type Listener struct {
	addr   net.Addr
	ctx    context.Context // ends by Close
	cancel context.CancelFunc

	mu     sync.Mutex
	ln     net.Listener
	failed error // why no connection can be accepted at present, or nil
}

// Listen binds HOST:PORT. ctx bounds only this first bind.
func Listen(ctx context.Context, address string) (*Listener, error) {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return On(ln), nil
}

// On does what [Listen] does, with an open listener, which then belongs to the Listener.
func On(ln net.Listener) *Listener {
	l := &Listener{addr: ln.Addr(), ln: ln}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// Addr returns the bound address. A bind after a failure takes the same one, the port of ":0" included.
func (l *Listener) Addr() net.Addr { return l.addr }

// Err returns why no connection can be accepted at present, or nil. The Listener goes on trying until Close.
func (l *Listener) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed
}

// Accept returns the next connection. While the socket fails, Accept pauses, up to a second, and tries again. It binds
// the address again unless the process only lacks file descriptors: then the socket is good, and keeps its backlog.
// After Close the error is [net.ErrClosed].
func (l *Listener) Accept() (net.Conn, error) {
	pause := time.Duration(0)
	for {
		l.mu.Lock()
		ln := l.ln
		l.mu.Unlock()
		conn, err := ln.Accept()
		switch {
		case l.ctx.Err() != nil:
			if conn != nil {
				_ = conn.Close()
			}
			return nil, net.ErrClosed
		case err == nil:
			l.report(nil)
			return conn, nil
		}
		l.report(err)
		if pause = min(max(2*pause, firstPause), maxPause); !l.sleep(pause) {
			return nil, net.ErrClosed
		}
		if !errors.Is(err, syscall.EMFILE) && !errors.Is(err, syscall.ENFILE) {
			_ = ln.Close()
			l.bind()
		}
	}
}

// bind tries once. If it fails, the closed socket stays, and the next Accept on it fails at once.
func (l *Listener) bind() {
	ln, err := new(net.ListenConfig).Listen(l.ctx, "tcp", l.addr.String())
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err != nil:
		l.failed = err
	case l.ctx.Err() != nil:
		_ = ln.Close()
	default:
		l.ln, l.failed = ln, nil
	}
}

// report keeps the reason of a failed bind, which says more than the closed socket that stays after it.
func (l *Listener) report(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil || l.failed == nil {
		l.failed = err
	}
}

// sleep returns false if Close comes first.
func (l *Listener) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.ctx.Done():
		return false
	}
}

// Close frees the address and ends Accept. It may be called several times.
func (l *Listener) Close() error {
	l.cancel()
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.ln.Close() // the socket may have died before
	return nil
}

// Fail closes the socket as if it had died. Only tests call it.
func (l *Listener) Fail() {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.ln.Close()
}
