// SPDX-License-Identifier: Apache-2.0

package zmq

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// maxReceived bounds a frame of a peer: subscriptions and requests for a replay are short.
const maxReceived = 64 << 10

// Listener is a bound socket: a PUB, which sends each message to all peers that have subscribed to it, or a ROUTER,
// which responds to each peer. All methods may be called concurrently.
type Listener struct {
	socketType string
	queue      int
	asked      func(p *Peer, frames [][]byte)
	ln         net.Listener
	running    sync.WaitGroup
	gate       sync.RWMutex // held for writing while the sockets are frozen

	mu     sync.Mutex
	peers  map[*Peer]struct{}
	closed bool
}

// Peer is one connection of a [Listener].
type Peer struct {
	conn net.Conn
	out  chan []byte
	done chan struct{}
	once sync.Once

	mu     sync.Mutex
	topics [][]byte
}

// ListenPUB binds a PUB socket at HOST:PORT. A message for a peer that has queue messages waiting is dropped without a
// word, as ZeroMQ does it at its high-water mark.
func ListenPUB(address string, queue int) (*Listener, error) {
	return listen("PUB", address, queue, nil)
}

// ListenROUTER binds a ROUTER socket at HOST:PORT. It calls asked with each message of each peer; one goroutine per
// peer does so.
func ListenROUTER(address string, asked func(p *Peer, frames [][]byte)) (*Listener, error) {
	return listen("ROUTER", address, 1<<16, asked)
}

func listen(socketType, address string, queue int, asked func(*Peer, [][]byte)) (*Listener, error) {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	l := &Listener{socketType: socketType, queue: queue, asked: asked, ln: ln, peers: map[*Peer]struct{}{}}
	l.running.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			l.accept(conn)
		}
	})
	return l, nil
}

// Addr is the listener's address, HOST:PORT.
func (l *Listener) Addr() string { return l.ln.Addr().String() }

func (l *Listener) accept(conn net.Conn) {
	p := &Peer{conn: conn, out: make(chan []byte, l.queue), done: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = conn.Close()
		return
	}
	l.peers[p] = struct{}{}
	l.running.Go(func() {
		_ = l.serve(p)
		p.end()
		l.mu.Lock()
		delete(l.peers, p)
		l.mu.Unlock()
	})
}

func (p *Peer) end() {
	p.once.Do(func() {
		close(p.done)
		_ = p.conn.Close()
	})
}

func (l *Listener) serve(p *Peer) error {
	_ = p.conn.SetDeadline(time.Now().Add(handshakeTime))
	r := bufio.NewReader(p.conn)
	if err := handshake(p.conn, r, l.socketType, ""); err != nil {
		return err
	}
	_ = p.conn.SetDeadline(time.Time{})
	l.running.Go(func() { l.write(p) })
	var message [][]byte
	for {
		flags, body, err := readFrame(r)
		if err != nil {
			return err
		}
		l.pass()
		switch {
		case flags&command != 0:
			p.command(body)
			continue
		case flags&more != 0:
			message = append(message, body)
			continue
		}
		message = append(message, body)
		if l.asked != nil {
			l.asked(p, message)
		} else if len(message) == 1 && len(body) > 0 {
			p.subscribe(body[0] == 1, body[1:])
		}
		message = nil
	}
}

func (l *Listener) write(p *Peer) {
	for {
		select {
		case b := <-p.out:
			l.pass()
			if _, err := p.conn.Write(b); err != nil {
				p.end()
				return
			}
		case <-p.done:
			return
		}
	}
}

// command follows ZMTP 3.1's SUBSCRIBE and CANCEL, and responds to PING.
func (p *Peer) command(body []byte) {
	if ttl, ok := bytes.CutPrefix(body, []byte("\x04PING")); ok && len(ttl) >= 2 {
		p.put(frame(nil, command, append([]byte("\x04PONG"), ttl[2:]...)))
	} else if topic, ok := bytes.CutPrefix(body, []byte("\x09SUBSCRIBE")); ok {
		p.subscribe(true, topic)
	} else if topic, ok := bytes.CutPrefix(body, []byte("\x06CANCEL")); ok {
		p.subscribe(false, topic)
	}
}

func (p *Peer) subscribe(on bool, topic []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if on {
		p.topics = append(p.topics, topic)
		return
	}
	for i := range p.topics {
		if bytes.Equal(p.topics[i], topic) {
			p.topics = append(p.topics[:i:i], p.topics[i+1:]...)
			return
		}
	}
}

func (p *Peer) wants(topic []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, prefix := range p.topics {
		if bytes.HasPrefix(topic, prefix) {
			return true
		}
	}
	return false
}

// put queues bytes, and reports whether there was room.
func (p *Peer) put(b []byte) bool {
	select {
	case p.out <- b:
		return true
	default:
		return false
	}
}

// Send sends a message to the peer. It waits while the peer's queue is full, and fails when the peer has gone.
func (p *Peer) Send(frames ...[]byte) error {
	select {
	case p.out <- encode(frames):
		return nil
	case <-p.done:
		return net.ErrClosed
	}
}

// Publish sends a message to the peers that have subscribed to its first frame.
func (l *Listener) Publish(frames ...[]byte) {
	b := encode(frames)
	l.mu.Lock()
	defer l.mu.Unlock()
	for p := range l.peers {
		if p.wants(frames[0]) {
			p.put(b)
		}
	}
}

// Drop closes the connections of all peers; they may connect again.
func (l *Listener) Drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for p := range l.peers {
		p.end()
	}
}

// Freeze stops reading and writing as SIGSTOP does, or lets them go on. Calls must come in turns. A frozen listener
// cannot be closed.
func (l *Listener) Freeze(frozen bool) {
	if frozen {
		l.gate.Lock()
	} else {
		l.gate.Unlock()
	}
}

// pass waits while the sockets are frozen.
func (l *Listener) pass() {
	l.gate.RLock()
	l.gate.RUnlock() //nolint:staticcheck // it only waits
}

// Close frees the address and ends all connections.
func (l *Listener) Close() {
	l.mu.Lock()
	l.closed = true
	_ = l.ln.Close()
	for p := range l.peers {
		p.end()
	}
	l.mu.Unlock()
	l.running.Wait()
}

func encode(frames [][]byte) (out []byte) {
	for i, body := range frames {
		flags := byte(more)
		if i == len(frames)-1 {
			flags = 0
		}
		out = frame(out, flags, body)
	}
	return out
}

var errTooLong = errors.New("zmq: a frame is too long")

func readFrame(r *bufio.Reader) (flags byte, body []byte, err error) {
	if flags, err = r.ReadByte(); err != nil {
		return 0, nil, err
	}
	var size uint64
	if flags&long != 0 {
		var b [8]byte
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(b[:])
	} else {
		short, err := r.ReadByte()
		if err != nil {
			return 0, nil, err
		}
		size = uint64(short)
	}
	if size > maxReceived {
		return 0, nil, fmt.Errorf("%w: %d bytes", errTooLong, size)
	}
	body = make([]byte, size)
	_, err = io.ReadFull(r, body)
	return flags, body, err
}
