// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"
)

// shutListener is a listener that can be shut. While it is shut, dialling gets no response, as with a host that is cut
// off. After it is opened the dialler's kernel tries again, 1, 3 or 7 seconds after its first try.
type shutListener struct {
	*net.TCPListener
	gate   sync.Mutex    // held while shut
	stuck  chan struct{} // gets a value when Accept waits at the gate
	mu     sync.Mutex    // guards the fields below
	isShut bool
	queued []net.Conn // the connections that fill the kernel's queue while the door is shut
}

func newShutListener() (*shutListener, error) {
	listener, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, err
	}
	return &shutListener{TCPListener: listener, stuck: make(chan struct{}, 1)}, nil
}

// Accept implements net.Listener. It returns nothing while the door is shut.
func (d *shutListener) Accept() (net.Conn, error) {
	conn, err := d.TCPListener.Accept()
	if !d.gate.TryLock() {
		select {
		case d.stuck <- struct{}{}:
		default:
		}
		d.gate.Lock()
	}
	defer d.gate.Unlock()
	return conn, err
}

// shut returns when no connection gets in any more. The caller must call open later, also after an error. The kernel
// accepts connections as long as its queue has room, so shut makes the queue short and fills it.
func (d *shutListener) shut() error {
	select {
	case <-d.stuck: // from an earlier shut
	default:
	}
	d.gate.Lock()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.isShut = true
	if err := d.setQueue(0); err != nil {
		return err
	}
	// The first connection keeps Accept busy. Only then does the queue stay full.
	if err := d.fill(5 * time.Second); err != nil {
		return err
	}
	select {
	case <-d.stuck:
	case <-time.After(5 * time.Second):
		return errors.New("the door does not shut: nobody accepts")
	}
	for range 8 {
		err := d.fill(200 * time.Millisecond)
		var timeout net.Error
		if errors.As(err, &timeout) && timeout.Timeout() {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return errors.New("the door does not shut: its queue has no end")
}

func (d *shutListener) fill(patience time.Duration) error {
	dialer := net.Dialer{Timeout: patience}
	conn, err := dialer.DialContext(context.Background(), "tcp4", d.Addr().String())
	if err == nil {
		d.queued = append(d.queued, conn)
	}
	return err
}

// open lets connections in again.
func (d *shutListener) open() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.isShut {
		return
	}
	d.isShut = false
	_ = d.setQueue(128)
	for _, conn := range d.queued {
		_ = conn.Close()
	}
	d.queued = nil
	d.gate.Unlock()
}

func (d *shutListener) setQueue(length int) error {
	raw, err := d.SyscallConn()
	if err != nil {
		return err
	}
	var listenErr error
	err = raw.Control(func(fd uintptr) { listenErr = syscall.Listen(int(fd), length) })
	return errors.Join(err, listenErr)
}
