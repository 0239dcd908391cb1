// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"sync"
)

// relay passes connections on to an engine's socket of ZeroMQ, and plays what a network does to them.
type relay struct {
	to string // HOST:PORT
	ln net.Listener

	mu     sync.Mutex
	pass   *sync.Cond
	conns  map[net.Conn]struct{}
	held   bool   // nothing passes
	shut   bool   // connections are refused
	lose   bool   // messages of the engine are dropped
	lost   int    // messages that were dropped
	next   uint64 // the number of the batch that comes next
	holes  int    // batches that the engine has left out, as it does above its high-water mark
	small  bool   // the buffer of what comes from the engine is small
	closed bool
}

func newRelay(to string) (*relay, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &relay{to: to, ln: ln, conns: map[net.Conn]struct{}{}}
	r.pass = sync.NewCond(&r.mu)
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go r.serve(conn)
		}
	}()
	return r, nil
}

func (r *relay) address() string { return r.ln.Addr().String() }

func (r *relay) close() {
	r.ln.Close()
	r.set(func() { r.closed = true })
	r.cut()
}

// set changes what the relay does.
func (r *relay) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
	r.pass.Broadcast()
}

// cut breaks all connections.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for conn := range r.conns {
		conn.Close()
	}
}

func (r *relay) serve(reader net.Conn) {
	defer reader.Close()
	r.mu.Lock()
	for r.held && !r.closed {
		r.pass.Wait()
	}
	refused := r.shut || r.closed
	r.mu.Unlock()
	if refused {
		return
	}
	engine, err := net.Dial("tcp", r.to) //nolint:noctx // a loopback address needs no look-up
	if err != nil {
		return
	}
	defer engine.Close()
	if tcp, ok := engine.(*net.TCPConn); ok && r.small {
		_ = tcp.SetReadBuffer(4 << 10)
	}
	r.set(func() { r.conns[reader], r.conns[engine] = struct{}{}, struct{}{} })
	defer r.set(func() { delete(r.conns, reader); delete(r.conns, engine) })
	go func() {
		defer engine.Close()
		defer reader.Close()
		for buf := make([]byte, 4<<10); ; {
			n, err := reader.Read(buf)
			r.wait()
			if err != nil {
				return
			}
			if _, err := engine.Write(buf[:n]); err != nil {
				return
			}
		}
	}()
	_ = r.messages(bufio.NewReaderSize(engine, 4<<10), reader)
}

// wait waits while nothing passes.
func (r *relay) wait() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.held && !r.closed {
		r.pass.Wait()
	}
}

// messages passes the engine's greeting on, and then whole messages.
func (r *relay) messages(engine *bufio.Reader, reader io.Writer) error {
	if _, err := io.CopyN(reader, engine, 64); err != nil {
		return err
	}
	var message []byte
	for frames := 0; ; frames++ {
		flags, err := engine.ReadByte()
		if err != nil {
			return err
		}
		size := make([]byte, 1+7*(flags>>1&1))
		if _, err := io.ReadFull(engine, size); err != nil {
			return err
		}
		begin := len(message) + 1 + len(size)
		length := binary.BigEndian.Uint64(append(make([]byte, 8-len(size)), size...))
		message = append(append(append(message, flags), size...), make([]byte, length)...)
		if _, err := io.ReadFull(engine, message[begin:]); err != nil {
			return err
		}
		if flags&4 == 0 && frames == 1 && length == 8 {
			r.count(binary.BigEndian.Uint64(message[begin:]))
		}
		if flags&1 != 0 {
			continue
		}
		if !r.drops(flags&4 == 0) {
			if _, err := reader.Write(message); err != nil {
				return err
			}
		}
		message, frames = message[:0], -1
	}
}

func (r *relay) count(seq uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next > 0 && seq > r.next {
		r.holes += int(seq - r.next)
	}
	r.next = seq + 1
}

// drops waits until a message may pass, and reports whether it is lost.
func (r *relay) drops(batch bool) bool {
	r.wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	if !batch || !r.lose {
		return false
	}
	r.lost++
	return true
}
