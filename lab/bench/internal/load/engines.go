// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"
)

// Engines are prefill and decode engines on loopback ports of their own. They answer at once, check each leg,
// and also /health, since a gateway asks for it.
type Engines struct {
	// Prefill and Decode are the engines' addresses, host:port.
	Prefill, Decode []string

	board     *Board
	listeners []net.Listener
	wg        sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
}

// StartEngines starts the given number of engines of each role.
func StartEngines(ctx context.Context, board *Board, perRole int) (*Engines, error) {
	e := &Engines{board: board, conns: make(map[net.Conn]struct{})}
	for i := range 2 * perRole {
		var lc net.ListenConfig
		l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			e.Close()
			return nil, err
		}
		e.listeners = append(e.listeners, l)
		prefill := i < perRole
		if prefill {
			e.Prefill = append(e.Prefill, l.Addr().String())
		} else {
			e.Decode = append(e.Decode, l.Addr().String())
		}
		e.wg.Go(func() { e.accept(l, prefill) })
	}
	return e, nil
}

// Close stops the engines, cuts their connections, and waits until their goroutines have ended.
func (e *Engines) Close() {
	e.mu.Lock()
	e.closed = true
	for c := range e.conns {
		c.Close()
	}
	e.mu.Unlock()
	for _, l := range e.listeners {
		l.Close()
	}
	e.wg.Wait()
}

func (e *Engines) accept(l net.Listener, prefill bool) {
	for {
		c, err := l.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				e.board.Fault("an engine cannot accept: %v", err)
			}
			return
		}
		e.mu.Lock()
		if e.closed {
			e.mu.Unlock()
			c.Close()
			return
		}
		e.conns[c] = struct{}{}
		e.mu.Unlock()
		e.wg.Go(func() {
			s := &engineConn{
				Conn: c, engines: e, br: bufio.NewReaderSize(c, 4<<10), prefill: prefill,
				checker: checker{board: e.board},
			}
			s.serve()
			e.mu.Lock()
			delete(e.conns, c)
			e.mu.Unlock()
			c.Close()
		})
	}
}

func (e *Engines) isClosed() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.closed
}

// engineConn serves one connection from a proxy.
type engineConn struct {
	net.Conn
	engines  *Engines
	br       *bufio.Reader
	prefill  bool
	checker  checker
	head     head
	in, out  []byte
	events   events
	response []byte
}

func (s *engineConn) serve() {
	for {
		// A proxy may close a connection between two requests: that is no fault.
		if err := s.head.read(s.br); err != nil {
			return
		}
		var err error
		if bytes.HasPrefix(s.head.line, []byte("POST /v1/chat/completions ")) {
			if s.in, err = s.head.body(s.br, s.in); err == nil {
				err = s.leg()
			}
		} else {
			err = s.other()
		}
		if err != nil {
			if !s.engines.isClosed() {
				s.engines.board.Fault("an engine lost its connection inside a request: %v", err)
			}
			return
		}
	}
}

// other answers a request that is not a leg.
func (s *engineConn) other() error {
	if s.head.framed && s.head.length != 0 {
		return errors.New("a body on a path that takes none")
	}
	switch {
	case bytes.HasPrefix(s.head.line, []byte("GET /health ")):
		return s.reply(200, "", nil)
	case bytes.HasPrefix(s.head.line, []byte("GET /v1/models ")):
		return s.reply(200, "application/json",
			[]byte(`{"object":"list","data":[{"id":"bench","object":"model","owned_by":"vllm"}]}`))
	case bytes.HasPrefix(s.head.line, []byte("GET /version ")): // by which smg knows vLLM
		return s.reply(200, "application/json", []byte(`{"version":"0.32.0"}`))
	}
	return s.reply(404, "application/json", []byte(`{"detail":"Not Found"}`))
}

func (s *engineConn) leg() error {
	b := s.engines.board
	l, err := s.checker.check(s.in, s.prefill)
	if err == nil && s.prefill {
		b.prefills.Add(1)
		s.response = appendPrefill(s.response[:0], b, l.slot, l.serial)
		return s.reply(200, "application/json", s.response)
	}
	var word uint64
	if err == nil {
		word, err = b.take(l.handoff, l.slot, l.serial)
	}
	if err != nil {
		role := "decode"
		if s.prefill {
			role = "prefill"
		}
		b.Fault("%s leg: %v", role, err)
		return s.reply(400, "application/json", fmt.Appendf(nil,
			`{"error":{"message":%q,"type":"BadRequestError","param":null,"code":400}}`, err))
	}
	b.decodes.Add(1)
	plan := b.slots[l.slot].plan.Load()
	if !plan.Prompt.stream {
		s.response = appendWhole(s.response[:0], l.serial, word)
		return s.reply(200, "application/json", s.response)
	}
	return s.stream(plan, l, word)
}

// reply writes a whole response with one write, as uvicorn does.
func (s *engineConn) reply(status int, contentType string, body []byte) error {
	s.out = append(s.out[:0], "HTTP/1.1 "...)
	s.out = strconv.AppendInt(s.out, int64(status), 10)
	s.out = append(s.out, " OK\r\ndate: Sat, 21 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: "...)
	s.out = strconv.AppendInt(s.out, int64(len(body)), 10)
	if contentType != "" {
		s.out = append(s.out, "\r\ncontent-type: "...)
		s.out = append(s.out, contentType...)
	}
	s.out = append(s.out, "\r\n\r\n"...)
	s.out = append(s.out, body...)
	_, err := s.Write(s.out)
	return err
}

// stream writes a streamed response: each event is an HTTP chunk, PerWrite of them go into one write.
func (s *engineConn) stream(plan *Plan, l leg, word uint64) error {
	b := s.engines.board
	slot := &b.slots[l.slot]
	const headText = "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n" +
		"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
	if _, err := s.Write([]byte(headText)); err != nil {
		return err
	}
	s.events.reset(l.serial, word)
	frameHead := strconv.AppendInt(nil, int64(len(s.events.chunk)), 16)
	frameHead = append(frameHead, "\r\n"...)
	perWrite := max(plan.PerWrite, 1)

	next := time.Now().Add(plan.Phase)
	sent := 0
	for plan.Chunks == 0 && !plan.Stop.Load() || sent < plan.Chunks {
		if plan.Interval > 0 {
			time.Sleep(time.Until(next))
			next = next.Add(plan.Interval)
		}
		s.out = s.out[:0]
		for range perWrite {
			s.out = append(s.out, frameHead...)
			s.out = append(s.out, s.events.at(sent)...)
			s.out = append(s.out, "\r\n"...)
			sent++
		}
		slot.sentAt.Store(b.now())
		if _, err := s.Write(s.out); err != nil {
			return fmt.Errorf("after %d chunks: %w", sent, err)
		}
	}
	// The client accepts the end of the stream only after this: the board then has the number of chunks that were sent.
	slot.chunks.Store(int64(sent))
	s.response = appendEnd(s.response[:0], l.serial, word, sent)
	s.out = strconv.AppendInt(s.out[:0], int64(len(s.response)), 16)
	s.out = append(s.out, "\r\n"...)
	s.out = append(s.out, s.response...)
	s.out = append(s.out, "\r\n0\r\n\r\n"...)
	_, err := s.Write(s.out)
	return err
}
