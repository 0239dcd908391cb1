// SPDX-License-Identifier: Apache-2.0

//go:build unix

package rawsocket

import (
	"net"
	"syscall"
)

// QuietCheck returns a function that reports whether nothing has arrived on raw, not even its end. It neither waits
// nor takes bytes from the socket. It is nil if raw is no socket.
func QuietCheck(raw net.Conn) func() bool {
	socket, ok := raw.(syscall.Conn)
	if !ok {
		return nil
	}
	rc, err := socket.SyscallConn()
	if err != nil {
		return nil
	}
	var quiet bool
	var one [1]byte
	look := func(fd uintptr) {
		_, err := retried(rawPeek, fd, one[:])
		quiet = err == syscall.EAGAIN || err == syscall.EWOULDBLOCK
	}
	return func() bool {
		quiet = false
		return rc.Control(look) == nil && quiet
	}
}

// Arrived returns the first bytes of what has arrived on raw, up to 16, and leaves them there.
func Arrived(raw net.Conn) []byte {
	socket, ok := raw.(syscall.Conn)
	if !ok {
		return nil
	}
	rc, err := socket.SyscallConn()
	if err != nil {
		return nil
	}
	first, n := make([]byte, 16), 0
	_ = rc.Control(func(fd uintptr) { n, _ = retried(rawPeek, fd, first) })
	return first[:n]
}

// retried makes a call again that a signal has interrupted.
func retried(call func(fd uintptr, p []byte) (int, syscall.Errno), fd uintptr, p []byte) (int, syscall.Errno) {
	for {
		n, err := call(fd, p)
		if err != syscall.EINTR {
			return n, err
		}
	}
}
