// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"time"
)

// This file is the little of ZMTP 3.0 (rfc.zeromq.org/spec/23, mechanism NULL) that a PULL socket needs which only reads. The library for
// ZeroMQ is not used here, for it trusts its peers: its accept loop shakes hands with one peer after the other, without a limit of time,
// so that a port scanner stops all notices; and it allocates what a frame's header announces, so that nine bytes end the process
// (go-zeromq/zmq4 0.17.0, socket.go and conn.go). Its PUSH is what the tests send with, beside libzmq's.

// maxFrame is the largest frame that is read. A notice has about 60 bytes.
const maxFrame = 4 << 10

// Bits of a frame's first byte.
const (
	frameMore    = 1
	frameLong    = 2
	frameCommand = 4
)

const greetingSize = 64

var errPeer = errors.New("lmcachepd: the peer does not speak ZMTP 3 as a PUSH socket")

// greeting opens a connection: signature, version 3.0, mechanism NULL, not a server.
var greeting = func() [greetingSize]byte {
	var g [greetingSize]byte
	g[0], g[9], g[10] = 0xff, 0x7f, 3
	copy(g[12:], "NULL")
	return g
}()

var (
	mechanism = greeting[12:32]
	ready     = command("READY", property("Socket-Type", "PULL"))
)

func command(name string, data []byte) []byte {
	body := append([]byte{byte(len(name))}, name...)
	body = append(body, data...)
	return append([]byte{frameCommand, byte(len(body))}, body...)
}

func property(name, value string) []byte {
	p := append([]byte{byte(len(name))}, name...)
	p = binary.BigEndian.AppendUint32(p, uint32(len(value)))
	return append(p, value...)
}

// handshake greets, and checks that the peer is a PUSH socket. The connection's deadline bounds it.
func handshake(conn net.Conn, r *bufio.Reader) error {
	if _, err := conn.Write(greeting[:]); err != nil {
		return err
	}
	var g [greetingSize]byte
	if _, err := io.ReadFull(r, g[:1]); err != nil {
		return err
	}
	if g[0] != 0xff { // whoever speaks another protocol is told by the first byte, and waits for nothing
		return errPeer
	}
	if _, err := io.ReadFull(r, g[1:]); err != nil {
		return err
	}
	if g[9]&1 == 0 || g[10] < 3 || !bytes.Equal(g[12:32], mechanism) {
		return errPeer
	}
	if _, err := conn.Write(ready); err != nil {
		return err
	}
	flags, body, err := readFrame(r, nil)
	if err != nil {
		return err
	}
	data, ok := bytes.CutPrefix(body, []byte("\x05READY"))
	if flags&frameCommand == 0 || !ok || !pushes(data) {
		return errPeer
	}
	return nil
}

// pushes looks for the property Socket-Type with the value PUSH. Names of properties are without case.
func pushes(data []byte) bool {
	for len(data) > 0 {
		n := int(data[0])
		if len(data) < 1+n+4 {
			return false
		}
		name, rest := string(data[1:1+n]), data[1+n:]
		size := binary.BigEndian.Uint32(rest)
		if rest = rest[4:]; uint64(size) > uint64(len(rest)) {
			return false
		}
		if strings.EqualFold(name, "Socket-Type") {
			return string(rest[:size]) == "PUSH"
		}
		data = rest[size:]
	}
	return false
}

// readFrame reads one frame into buf, or into a larger one. A frame above maxFrame is an error.
func readFrame(r *bufio.Reader, buf []byte) (flags byte, body []byte, err error) {
	if flags, err = r.ReadByte(); err != nil {
		return 0, nil, err
	}
	var size uint64
	if flags&frameLong != 0 {
		var long [8]byte
		if _, err = io.ReadFull(r, long[:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(long[:])
	} else {
		short, err := r.ReadByte()
		if err != nil {
			return 0, nil, err
		}
		size = uint64(short)
	}
	if size > maxFrame || flags&^(frameMore|frameLong|frameCommand) != 0 {
		return 0, nil, errPeer
	}
	if uint64(cap(buf)) < size {
		buf = make([]byte, size)
	}
	body = buf[:size]
	_, err = io.ReadFull(r, body)
	return flags, body, err
}

// readMessages calls each for every message of one frame, until the connection ends. Messages of several frames are counted as one that
// cannot be read. The bytes are each's only until it returns.
func readMessages(conn net.Conn, r *bufio.Reader, each func(body []byte)) error {
	buf := make([]byte, 256)
	parts := 0
	for {
		flags, body, err := readFrame(r, buf)
		switch {
		case err != nil:
			return err
		case flags&frameCommand != 0:
			if err := pong(conn, body); err != nil {
				return err
			}
			continue
		case flags&frameMore != 0:
			parts++
			continue
		case parts > 0:
			body = nil
		}
		parts = 0
		each(body)
	}
}

// pong answers a heartbeat: a PING's body is a time to live of two bytes, and a context that comes back.
func pong(conn net.Conn, body []byte) error {
	ping, ok := bytes.CutPrefix(body, []byte("\x04PING"))
	if !ok || len(ping) < 2 || len(ping) > 2+16 {
		return nil // of the commands only heartbeats are for a PULL socket
	}
	if err := conn.SetWriteDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	_, err := conn.Write(command("PONG", ping[2:]))
	return err
}
