// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net"
	"sync"
)

// doorListener is a listener whose port can be closed and opened again while the
// HTTP server on it lives on.
type doorListener struct {
	addr string

	mu     sync.Mutex
	turn   *sync.Cond
	ln     net.Listener // nil while the door is shut
	closed bool
}

func openDoor(addr string) (*doorListener, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	d := &doorListener{addr: ln.Addr().String(), ln: ln}
	d.turn = sync.NewCond(&d.mu)
	return d, nil
}

func (d *doorListener) Accept() (net.Conn, error) {
	for {
		d.mu.Lock()
		for d.ln == nil && !d.closed {
			d.turn.Wait()
		}
		ln, closed := d.ln, d.closed
		d.mu.Unlock()
		if closed {
			return nil, net.ErrClosed
		}
		conn, err := ln.Accept()
		if err == nil {
			return conn, nil
		}
		d.mu.Lock()
		same := d.ln == ln && !d.closed
		d.mu.Unlock()
		if same {
			return nil, err
		}
	}
}

// shut closes the port, or opens it again.
func (d *doorListener) shut(shut bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || shut == (d.ln == nil) {
		return nil
	}
	if shut {
		err := d.ln.Close()
		d.ln = nil
		return err
	}
	ln, err := net.Listen("tcp", d.addr)
	if err != nil {
		return err
	}
	d.ln = ln
	d.turn.Broadcast()
	return nil
}

func (d *doorListener) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	d.turn.Broadcast()
	if d.ln == nil {
		return nil
	}
	return d.ln.Close()
}

// Addr is the address, also while the door is shut.
func (d *doorListener) Addr() net.Addr {
	addr, err := net.ResolveTCPAddr("tcp", d.addr)
	if err != nil {
		return &net.TCPAddr{}
	}
	return addr
}
