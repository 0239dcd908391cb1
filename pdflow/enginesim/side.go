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
	node   *node
	ln     net.Listener
	wg     sync.WaitGroup
	offers offers
	// writes says that this engine is the one that moves the bytes, and counts
	// them, as in the protocols in which the prefill engine writes.
	writes bool
	// named, if set, answers a read by name in place of giveNamed, in a goroutine
	// of its own; left is told of a reader that gave up a name nobody has offered.
	named func(pipe *Pipe, f Frame, m askMessage)
	left  func(name string)

	mu     sync.Mutex
	pipes  map[*Pipe]struct{}
	closed bool
	gate   gate
}

func listenSide(n *node) (*side, error) {
	ln, err := net.Listen("tcp", n.cfg.SideChannel)
	if err != nil {
		return nil, err
	}
	s := &side{node: n, ln: ln, pipes: map[*Pipe]struct{}{}}
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
		data, err := json.Marshal(s.node.hello())
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
				s.node.stats.add(&s.node.stats.Orphans, 1)
				if s.left != nil {
					s.left(m.Name)
				}
				return pipe.Send(Frame{Kind: FrameReleased, Transfer: f.Transfer})
			}
		}
		if s.node.core.unpin(m.Request) {
			s.node.ledger.consumed(m.Request)
		} else {
			s.node.stats.add(&s.node.stats.AfterExpiry, 1)
		}
		return pipe.Send(Frame{Kind: FrameReleased, Transfer: f.Transfer})
	case FrameHeartbeat:
		var m requestMessage
		if err := json.Unmarshal(f.Data, &m); err != nil {
			return err
		}
		s.node.core.extend(m.Request)
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
	if s.named != nil {
		s.wg.Go(func() { s.named(pipe, f, m) })
		return nil
	}
	s.wg.Go(func() {
		request, soon := s.offers.get(m.Name)
		if soon != nil {
			select {
			case <-soon:
			case <-s.gate.ended:
				return
			}
			if request, soon = s.offers.get(m.Name); soon != nil { // the reader has left
				return
			}
		}
		s.giveNamed(pipe, f, m, request)
	})
	return nil
}

// giveNamed gives what a request has offered.
func (s *side) giveNamed(pipe *Pipe, f Frame, m askMessage, request string) {
	blocks, _, known := s.node.core.leased(request)
	if !known || m.First < 0 || m.Count < 0 || m.First+m.Count > len(blocks) {
		_ = pipe.Send(Frame{Kind: FrameError, Transfer: f.Transfer, Key: f.Key})
		return
	}
	m.Request = request
	for _, id := range blocks[m.First : m.First+m.Count] {
		m.Blocks = append(m.Blocks, int64(id))
	}
	if s.writes {
		// Before they are sent: who looks at the counters once the reader has
		// answered must find them.
		s.node.stats.transferred(len(m.Blocks)*s.node.core.pool.size, len(m.Blocks), time.Millisecond)
	}
	_ = s.give(pipe, f, m)
}

// give sends blocks as they are in memory now. Like a remote read, it asks
// neither whose they are nor whether the lease still holds; only the ledger
// takes note.
func (s *side) give(pipe *Pipe, f Frame, m askMessage) error {
	core := s.node.core
	ids := make([]int32, len(m.Blocks))
	for i, id := range m.Blocks {
		if id < 0 || id > int64(core.pool.blocks()) {
			return pipe.Send(Frame{Kind: FrameError, Transfer: f.Transfer, Key: f.Key})
		}
		ids[i] = int32(id)
	}
	blocks, prompt, known := core.leased(m.Request)
	s.node.ledger.read(m.Request, ids, f.Key, blocks, prompt, known)
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

// gate holds back whoever passes while it is shut.
type gate struct {
	mu    sync.Mutex
	open  chan struct{} // closed while the gate is open
	ended chan struct{}
	once  sync.Once
}

func (g *gate) init() {
	g.open, g.ended = make(chan struct{}), make(chan struct{})
	close(g.open)
}

func (g *gate) set(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
		if shut {
			g.open = make(chan struct{})
		}
	default:
		if !shut {
			close(g.open)
		}
	}
}

// shut says whether the gate is shut now.
func (g *gate) shut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
		return false
	default:
		return true
	}
}

// pass waits until the gate is open; false when it has ended.
func (g *gate) pass() bool {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
		return true
	case <-g.ended:
		return false
	}
}

// end lets everybody go for good.
func (g *gate) end() { g.once.Do(func() { close(g.ended) }) }
