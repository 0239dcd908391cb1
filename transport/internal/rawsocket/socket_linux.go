// SPDX-License-Identifier: Apache-2.0

package rawsocket

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
)

// rawLimit is the most bytes that a raw system call copies, since no goroutine runs in its place meanwhile.
const rawLimit = 64 << 10

// socket is a TCP connection whose reads and writes are raw system calls, for the reason that transport.NewListener
// gives. It can wait for bytes without a buffer for them.
type socket struct {
	*net.TCPConn
	raw     syscall.RawConn
	in, out direction
	closed  sync.Once
}

// direction is a read or a write that runs. Its function is made once, for all calls.
type direction struct {
	sync.Mutex
	try    func(fd uintptr) bool // returns false to be called again when the socket is ready
	p      []byte
	n      int
	err    syscall.Errno
	pool   *sync.Pool // of *[]byte; a read takes its buffer there, if p is nil
	pooled *[]byte    // what it has taken
}

// New returns c as a *socket if it is a TCP connection, else c.
func New(c net.Conn) net.Conn {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return c
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return c
	}
	s := &socket{TCPConn: tcp, raw: raw}
	s.in.try, s.out.try = s.tryRead, s.tryWrite
	monitored.add(1)
	return s
}

// Close implements net.Conn.
func (s *socket) Close() error {
	s.closed.Do(func() { monitored.add(-1) })
	return s.TCPConn.Close()
}

// Read implements net.Conn.
func (s *socket) Read(p []byte) (int, error) {
	if len(p) == 0 || len(p) > rawLimit {
		return s.TCPConn.Read(p)
	}
	s.in.Lock()
	defer s.in.Unlock()
	s.in.p = p
	return s.read()
}

// ReadPooled reads into a buffer of pool, which it has only while it looks for bytes, not while it waits for them. The
// buffer is nil if there is an error.
func (s *socket) ReadPooled(pool *sync.Pool) (*[]byte, int, error) {
	s.in.Lock()
	defer s.in.Unlock()
	s.in.pool = pool
	n, err := s.read()
	pooled := s.in.pooled
	s.in.pool, s.in.pooled = nil, nil
	return pooled, n, err
}

func (s *socket) read() (int, error) {
	s.in.n, s.in.err = 0, 0
	err := s.raw.Read(s.in.try)
	s.in.p = nil
	switch {
	case err != nil:
		return 0, named("read", err)
	case s.in.err != 0:
		return 0, s.fault("read", s.in.err)
	case s.in.n == 0:
		return 0, io.EOF
	}
	return s.in.n, nil
}

func (s *socket) tryRead(fd uintptr) bool {
	in := &s.in
	p := in.p
	var pooled *[]byte
	if p == nil {
		pooled = in.pool.Get().(*[]byte)
		p = (*pooled)[:min(len(*pooled), rawLimit)]
	}
	n, err := retried(rawRead, fd, p)
	if n > 0 {
		in.n, in.pooled = n, pooled
		return true
	}
	if pooled != nil {
		in.pool.Put(pooled)
	}
	if err == syscall.EAGAIN {
		return false
	}
	in.err = err
	return true
}

// Write implements net.Conn.
func (s *socket) Write(p []byte) (int, error) {
	if len(p) == 0 || len(p) > rawLimit {
		return s.TCPConn.Write(p)
	}
	s.out.Lock()
	defer s.out.Unlock()
	s.out.p, s.out.n, s.out.err = p, 0, 0
	err := s.raw.Write(s.out.try)
	s.out.p = nil
	switch {
	case err != nil:
		err = named("write", err)
	case s.out.err != 0:
		err = s.fault("write", s.out.err)
	case s.out.n < len(p):
		err = io.ErrUnexpectedEOF // as package poll has it
	}
	return s.out.n, err
}

func (s *socket) tryWrite(fd uintptr) bool {
	out := &s.out
	for out.n < len(out.p) {
		n, err := retried(rawWrite, fd, out.p[out.n:])
		if err == syscall.EAGAIN {
			return false
		}
		if out.err = err; err != 0 || n == 0 {
			return true
		}
		out.n += n
	}
	return true
}

// named gives an error of a RawConn, a passed deadline say, the operation's name as net has it.
func named(op string, err error) error {
	if e, ok := errors.AsType[*net.OpError](err); ok {
		e.Op = op
	}
	return err
}

// fault returns an error as net has it.
func (s *socket) fault(op string, err syscall.Errno) error {
	return &net.OpError{Op: op, Net: "tcp", Source: s.LocalAddr(), Addr: s.RemoteAddr(),
		Err: os.NewSyscallError(op, err)}
}
