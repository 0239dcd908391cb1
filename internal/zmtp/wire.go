// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"time"
)

const (
	// maxFrame is the largest frame that is read. The expected messages have 60 to 300 bytes.
	maxFrame = 4 << 10
	// maxParts and maxCommands bound what is no expected message: the frames before a message's last one, and the
	// commands of one second. Expected messages have one frame, and heartbeats come about once a second.
	maxParts    = 64
	maxCommands = 256
)

// Bits of a frame's first byte.
const (
	frameMore    = 1
	frameLong    = 2
	frameCommand = 4
)

const greetingSize = 64

var errPeer = errors.New("zmtp: the peer does not speak ZMTP 3 as a socket that is admitted")

// greeting opens a connection: signature, version 3.0, mechanism NULL, not a server.
var greeting = func() [greetingSize]byte {
	var g [greetingSize]byte
	g[0], g[9], g[10] = 0xff, 0x7f, 3
	copy(g[12:], "NULL")
	return g
}()

var mechanism = greeting[12:32]

// ready returns the command that ends the handshake, for a socket type. The identity in the peer's own READY is
// ignored, since only responses would need it.
func ready(socket string) []byte { return command("READY", property("Socket-Type", socket)) }

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

// handshake exchanges greetings as a socket of a type, and checks that the peer's type is one of peers. The
// connection's deadline bounds it.
func handshake(conn net.Conn, r *bufio.Reader, socket string, peers []string) error {
	if _, err := conn.Write(greeting[:]); err != nil {
		return err
	}
	var g [greetingSize]byte
	if _, err := io.ReadFull(r, g[:1]); err != nil {
		return err
	}
	if g[0] != 0xff { // the first byte shows that the peer speaks another protocol, so wait for nothing more
		return errPeer
	}
	if _, err := io.ReadFull(r, g[1:]); err != nil {
		return err
	}
	if g[9]&1 == 0 || g[10] < 3 || !bytes.Equal(g[12:32], mechanism) {
		return errPeer
	}
	if _, err := conn.Write(ready(socket)); err != nil {
		return err
	}
	flags, body, err := readFrame(r, nil)
	if err != nil {
		return err
	}
	data, ok := bytes.CutPrefix(body, []byte("\x05READY"))
	if flags&frameCommand == 0 || !ok || !slices.Contains(peers, socketType(data)) {
		return errPeer
	}
	return nil
}

// socketType returns the property Socket-Type, or "". Property names ignore case.
func socketType(data []byte) string {
	for len(data) > 0 {
		n := int(data[0])
		if len(data) < 1+n+4 {
			return ""
		}
		name, rest := string(data[1:1+n]), data[1+n:]
		size := binary.BigEndian.Uint32(rest)
		if rest = rest[4:]; uint64(size) > uint64(len(rest)) {
			return ""
		}
		if strings.EqualFold(name, "Socket-Type") {
			return string(rest[:size])
		}
		data = rest[size:]
	}
	return ""
}

// readFrame reads one frame into buf, or into a larger one. A frame above maxFrame is an error.
func readFrame(r *bufio.Reader, buf []byte) (flags byte, body []byte, err error) {
	flags, size, err := readHeader(r)
	if err != nil {
		return 0, nil, err
	}
	if size > maxFrame {
		return 0, nil, errPeer
	}
	body, err = readBody(r, buf[:0], int(size))
	return flags, body, err
}

// readHeader reads a frame's flags and the size of its body.
func readHeader(r *bufio.Reader) (flags byte, size uint64, err error) {
	if flags, err = r.ReadByte(); err != nil {
		return 0, 0, err
	}
	if flags&^(frameMore|frameLong|frameCommand) != 0 {
		return 0, 0, errPeer
	}
	if flags&frameLong == 0 {
		short, err := r.ReadByte()
		return flags, uint64(short), err
	}
	var long [8]byte
	_, err = io.ReadFull(r, long[:])
	return flags, binary.BigEndian.Uint64(long[:]), err
}

// readBody appends a frame's body to buf, which grows only as fast as the body comes: a header alone takes no memory.
func readBody(r *bufio.Reader, buf []byte, size int) ([]byte, error) {
	for size > 0 {
		n := min(size, 64<<10)
		buf = slices.Grow(buf, n)
		read, err := io.ReadFull(r, buf[len(buf):len(buf)+n])
		buf = buf[:len(buf)+read]
		if err != nil {
			return buf, err
		}
		size -= n
	}
	return buf, nil
}

// readMessages calls each for every message of one frame, until the connection ends. For a message of several frames it
// calls each(nil), since such a message cannot be read but is counted. The bytes are valid until each returns.
func readMessages(conn net.Conn, r *bufio.Reader, each func(body []byte)) error {
	buf := make([]byte, 256)
	parts, commands, since := 0, 0, time.Now()
	for {
		flags, body, err := readFrame(r, buf)
		switch {
		case err != nil:
			return err
		case flags&frameCommand != 0:
			if commands++; commands > maxCommands {
				if time.Since(since) < time.Second {
					return errPeer
				}
				commands, since = 1, time.Now()
			}
			if err := pong(conn, body); err != nil {
				return err
			}
			continue
		case flags&frameMore != 0:
			if parts++; parts > maxParts {
				return errPeer
			}
			continue
		case parts > 0:
			body = nil
		}
		parts = 0
		each(body)
	}
}

// pong responds to a heartbeat. The body of a PING is a time to live of two bytes, and a context that the PONG repeats.
func pong(conn net.Conn, body []byte) error {
	ping, ok := bytes.CutPrefix(body, []byte("\x04PING"))
	if !ok || len(ping) < 2 || len(ping) > 2+16 {
		return nil // heartbeats are the only commands for a socket that only reads
	}
	if err := conn.SetWriteDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return err
	}
	_, err := conn.Write(command("PONG", ping[2:]))
	return err
}
