// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"encoding/json"
	"net"
	"sync"
	"time"
)

// side is the side channel of an engine whose blocks others read.
type side struct {
	host   *host
	ln     net.Listener
	wg     sync.WaitGroup
	offers offers
	wireOptions

	mu     sync.Mutex
	pipes  map[*Pipe]struct{}
	closed bool
	gate   gate
}

func listenSide(h *host, options wireOptions) (*side, error) {
	ln, err := net.Listen("tcp", h.sideChannel)
	if err != nil {
		return nil, err
	}
	s := &side{host: h, ln: ln, wireOptions: options, pipes: map[*Pipe]struct{}{}}
	s.gate.init()
	s.wg.Go(s.accept)
	return s, nil
}

// address is what handoffs name.
func (s *side) address() (string, int) {
	a := s.ln.Addr().(*net.TCPAddr) //nolint:errcheck // it listens on TCP
	return a.IP.String(), a.Port
}

func (s *side) accept() {
	for {
		conn, err := s.ln.Accept()
		if err != nil {
			return
		}
		pipe := NewPipe(conn)
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = pipe.Close()
			return
		}
		s.pipes[pipe] = struct{}{}
		s.wg.Go(func() { s.serve(pipe) })
		s.mu.Unlock()
	}
}

func (s *side) serve(pipe *Pipe) {
	defer func() {
		_ = pipe.Close()
		s.mu.Lock()
		delete(s.pipes, pipe)
		s.mu.Unlock()
	}()
	for {
		f, err := pipe.Recv()
		if err != nil || !s.gate.pass() || s.answer(pipe, f) != nil {
			return
		}
	}
}

func (s *side) answer(pipe *Pipe, f Frame) error {
	switch f.Kind {
	case FrameHello:
		data, err := json.Marshal(s.host.hello())
		if err != nil {
			return err
		}
		return pipe.Send(Frame{Kind: FrameHello, Data: data})
	case FrameAsk:
		return s.asked(pipe, f)
	case FrameRelease:
		var m requestMessage
		if err := json.Unmarshal(f.Data, &m); err != nil {
			return err
		}
		if m.Name != "" {
			var known bool
			if m.Request, known = s.offers.drop(m.Name); !known {
				s.host.core.stats.add(&s.host.core.stats.Orphans, 1)
				if s.left != nil {
					s.left(m.Name)
				}
				return pipe.Send(Frame{Kind: FrameReleased, Transfer: f.Transfer})
			}
		}
		if s.host.core.unpin(m.Request) {
			s.host.core.ledger.consumed(m.Request)
		} else {
			s.host.core.stats.add(&s.host.core.stats.AfterExpiry, 1)
		}
		return pipe.Send(Frame{Kind: FrameReleased, Transfer: f.Transfer})
	case FrameHeartbeat:
		var m requestMessage
		if err := json.Unmarshal(f.Data, &m); err != nil {
			return err
		}
		s.host.core.extend(m.Request)
	}
	return nil
}

// asked gives blocks by their ids at once, and blocks by name when somebody has
// offered them; the pipe is not held up meanwhile.
func (s *side) asked(pipe *Pipe, f Frame) error {
	var m askMessage
	if err := json.Unmarshal(f.Data, &m); err != nil {
		return err
	}
	if m.Name == "" {
		return s.give(pipe, f, m)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return net.ErrClosed
	}
	answer := s.giveOffered
	if s.named != nil {
		answer = s.named
	}
	s.wg.Go(func() { answer(pipe, f, m) })
	return nil
}

// giveOffered gives what somebody has offered under a name, or will offer.
func (s *side) giveOffered(pipe *Pipe, f Frame, m askMessage) {
	if request, ok := s.await(m.Name); ok {
		s.giveNamed(pipe, f, m, request)
	}
}

// await waits until a name is offered and returns the request behind it. ok is false when its reader leaves first, or
// the engine ends.
func (s *side) await(name string) (request string, ok bool) {
	request, soon := s.offers.get(name)
	if soon == nil {
		return request, true
	}
	select {
	case <-soon:
		request, soon = s.offers.get(name)
		return request, soon == nil
	case <-s.gate.ended:
		return "", false
	}
}

// forget takes back what is offered under a name, and lets go of its blocks.
func (s *side) forget(name string) {
	if request, ok := s.offers.drop(name); ok && s.host.core.unpin(request) {
		s.host.core.ledger.consumed(request)
	}
}

// refuse answers an ask that is not served.
func refuse(pipe *Pipe, f Frame) {
	_ = pipe.Send(Frame{Kind: FrameError, Transfer: f.Transfer, Key: f.Key})
}

// giveNamed gives what a request has offered.
func (s *side) giveNamed(pipe *Pipe, f Frame, m askMessage, request string) {
	blocks, _, known := s.host.core.leased(request)
	if !known || m.First < 0 || m.Count < 0 || m.First+m.Count > len(blocks) {
		refuse(pipe, f)
		return
	}
	m.Request = request
	for _, id := range blocks[m.First : m.First+m.Count] {
		m.Blocks = append(m.Blocks, int64(id))
	}
	if s.writes {
		// Before they are sent: who looks at the counters once the reader has
		// answered must find them.
		s.host.core.stats.transferred(len(m.Blocks)*s.host.core.blockBytes, len(m.Blocks), time.Millisecond)
	}
	_ = s.give(pipe, f, m)
}

// give sends blocks as they are in memory now. Like a remote read, it asks
// neither whose they are nor whether the lease still holds; only the ledger
// takes note.
func (s *side) give(pipe *Pipe, f Frame, m askMessage) error {
	core := s.host.core
	ids := make([]int32, len(m.Blocks))
	for i, id := range m.Blocks {
		if id < 0 || id > int64(core.blocks()) {
			return pipe.Send(Frame{Kind: FrameError, Transfer: f.Transfer, Key: f.Key})
		}
		ids[i] = int32(id)
	}
	blocks, prompt, known := core.leased(m.Request)
	s.host.core.ledger.read(m.Request, ids, f.Key, blocks, prompt, known)
	const atOnce = 64
	for first := 0; first < len(ids); first += atOnce {
		if !s.gate.pass() {
			return net.ErrClosed
		}
		contents := core.read(ids[first:min(first+atOnce, len(ids))])
		frames := make([]Frame, len(contents))
		for i, content := range contents {
			frames[i] = Frame{Kind: FrameBlock, Transfer: f.Transfer, Key: f.Key, Index: uint32(first + i), Count: uint32(len(ids)), Data: content}
		}
		if err := pipe.Send(frames...); err != nil {
			return err
		}
	}
	return nil
}

func (s *side) freeze(frozen bool) { s.gate.set(frozen) }

func (s *side) close() {
	_ = s.ln.Close()
	s.gate.end()
	s.mu.Lock()
	s.closed = true
	for pipe := range s.pipes {
		_ = pipe.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}
