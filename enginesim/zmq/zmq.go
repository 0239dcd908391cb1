// SPDX-License-Identifier: Apache-2.0

// Package zmq has ZeroMQ sockets that send: those by which engines tell a gateway something. It shares no code with the
// gateway's side, and has what such an engine uses of ZMTP 3.0 (rfc.zeromq.org/spec/23): TCP, the mechanism NULL, the
// sockets PUSH, DEALER and PUB that connect ([Dial]), and the bound sockets PUB and ROUTER ([Listener]).
package zmq

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

const (
	handshakeTime = 10 * time.Second
)

// Bits of a frame's first byte.
const (
	more    = 1
	long    = 2
	command = 4
)

// Socket is one connection to a peer that listens. Send may be called concurrently.
type Socket struct {
	conn net.Conn
	read chan struct{} // closed when nothing more comes from the peer

	mu sync.Mutex
}

// Dial connects a socket of a type, "PUSH", "DEALER" or "PUB" (which sends all messages: the SUB socket at the address
// filters them), to a TCP address, HOST:PORT. The error is that of the
// connection, or tells that the peer is no ZMTP 3 socket. The peer learns the identity, if it is not "".
func Dial(ctx context.Context, socketType, address, identity string) (*Socket, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_ = conn.SetDeadline(time.Now().Add(handshakeTime))
	r := bufio.NewReader(conn)
	if err := handshake(conn, r, socketType, identity); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("zmq: %w", err)
	}
	_ = conn.SetDeadline(time.Time{})
	s := &Socket{conn: conn, read: make(chan struct{})}
	go func() { // the peer says nothing of interest
		defer close(s.read)
		_, _ = io.Copy(io.Discard, r)
	}()
	return s, nil
}

func handshake(conn net.Conn, r *bufio.Reader, socketType, identity string) error {
	// Signature, version 3.0, mechanism NULL, as-server 0, filler.
	hello := [64]byte{0: 0xff, 8: 1, 9: 0x7f, 10: 3, 12: 'N', 13: 'U', 14: 'L', 15: 'L'}
	ready := property([]byte("\x05READY"), "Socket-Type", socketType)
	if identity != "" {
		ready = property(ready, "Identity", identity)
	}
	if _, err := conn.Write(frame(hello[:], command, ready)); err != nil {
		return err
	}
	var theirs [64]byte
	if _, err := io.ReadFull(r, theirs[:]); err != nil {
		return err
	}
	if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || string(theirs[12:17]) != "NULL\x00" {
		return fmt.Errorf("the peer is no socket of ZMTP 3 with the mechanism NULL: %x", theirs[:17])
	}
	flags, err := r.ReadByte()
	if err != nil {
		return err
	}
	size, err := r.ReadByte()
	if err != nil {
		return err
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return err
	}
	if flags != command || len(body) < 6 || string(body[:6]) != "\x05READY" {
		return fmt.Errorf("the peer is not ready: %q", body)
	}
	return nil
}

// property appends a property of a READY command.
func property(to []byte, name, value string) []byte {
	to = append(append(to, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(to, uint32(len(value))), value...)
}

// frame appends a frame.
func frame(to []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		to = binary.BigEndian.AppendUint64(append(to, flags|long), uint64(len(body)))
	} else {
		to = append(to, flags, byte(len(body)))
	}
	return append(to, body...)
}

// Send sends a message of one or more frames. It waits for the connection, never for the peer's program.
func (s *Socket) Send(frames ...[]byte) error {
	out := encode(frames)
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.conn.Write(out)
	return err
}

// Close ends the connection. What was sent before still arrives.
func (s *Socket) Close() error {
	err := s.conn.Close()
	<-s.read
	return err
}
