// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"time"
)

// portListener is a listener whose port can be closed and opened again while the HTTP server on it lives on.
type portListener struct {
	addr string

	mu      sync.Mutex
	changed *sync.Cond
	ln      net.Listener // nil while the port is closed
	closed  bool
}

func listenPort(addr string) (*portListener, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	l := &portListener{addr: ln.Addr().String(), ln: ln}
	l.changed = sync.NewCond(&l.mu)
	return l, nil
}

func (l *portListener) Accept() (net.Conn, error) {
	for {
		l.mu.Lock()
		for l.ln == nil && !l.closed {
			l.changed.Wait()
		}
		ln, closed := l.ln, l.closed
		l.mu.Unlock()
		if closed {
			return nil, net.ErrClosed
		}
		conn, err := ln.Accept()
		if err == nil {
			return conn, nil
		}
		l.mu.Lock()
		same := l.ln == ln && !l.closed
		l.mu.Unlock()
		if same {
			return nil, err
		}
	}
}

// shut closes the port, or opens it again.
func (l *portListener) shut(shut bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || shut == (l.ln == nil) {
		return nil
	}
	if shut {
		err := l.ln.Close()
		l.ln = nil
		return err
	}
	if err := Again(func() (err error) { l.ln, err = net.Listen("tcp", l.addr); return err }); err != nil {
		return err
	}
	l.changed.Broadcast()
	return nil
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

func (l *portListener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	l.changed.Broadcast()
	if l.ln == nil {
		return nil
	}
	return l.ln.Close()
}

// Addr is the address, also while the port is closed.
func (l *portListener) Addr() net.Addr {
	addr, err := net.ResolveTCPAddr("tcp", l.addr)
	if err != nil {
		return &net.TCPAddr{}
	}
	return addr
}
