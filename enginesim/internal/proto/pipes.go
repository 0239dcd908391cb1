// SPDX-License-Identifier: Apache-2.0

package proto

import (
	"context"
	"net"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// PipeServer takes connections of other engines, each a pipe.
type PipeServer struct {
	Gate core.Gate // shut while the engine is frozen

	ln     net.Listener
	wg     sync.WaitGroup
	mu     sync.Mutex
	pipes  map[*core.Pipe]struct{}
	closed bool
}

// ListenPipes opens the port. Nobody is served before Serve.
func ListenPipes(address string) (*PipeServer, error) {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	s := &PipeServer{ln: ln, pipes: map[*core.Pipe]struct{}{}}
	s.Gate.Init()
	return s, nil
}

// Address is where the server listens.
func (s *PipeServer) Address() (host string, port int) {
	a := s.ln.Addr().(*net.TCPAddr) //nolint:errcheck // it listens on TCP
	return a.IP.String(), a.Port
}

// Serve starts to take pipes. It closes each when handle returns.
func (s *PipeServer) Serve(handle func(*core.Pipe)) {
	s.wg.Go(func() {
		for {
			conn, err := s.ln.Accept()
			if err != nil {
				return
			}
			pipe := core.NewPipe(conn)
			if !s.Go(func() { s.serve(pipe, handle) }, pipe) {
				_ = pipe.Close()
			}
		}
	})
}

func (s *PipeServer) serve(pipe *core.Pipe, handle func(*core.Pipe)) {
	defer func() {
		_ = pipe.Close()
		s.mu.Lock()
		delete(s.pipes, pipe)
		s.mu.Unlock()
	}()
	if s.Gate.Pass() {
		handle(pipe)
	}
}

// Go starts work that Close waits for, after it has closed the pipes. It returns false when it is too late for that.
func (s *PipeServer) Go(work func(), pipes ...*core.Pipe) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		for _, pipe := range pipes {
			s.pipes[pipe] = struct{}{}
		}
		s.wg.Go(work)
	}
	return !s.closed
}

// Close closes the port and all pipes, and waits until nobody is served.
func (s *PipeServer) Close() {
	_ = s.ln.Close()
	s.Gate.End()
	s.mu.Lock()
	s.closed = true
	for pipe := range s.pipes {
		_ = pipe.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// Dial opens a pipe to another engine.
func Dial(ctx context.Context, host, port string) (*core.Pipe, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, err
	}
	return core.NewPipe(conn), nil
}
