// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"time"
)

// keptBuffer is the largest buffer, in bytes, that a connection keeps from one message to the next.
const keptBuffer = 1 << 20

// ErrTooMuch says that a peer sent a message above the limits of its [Conn].
var ErrTooMuch = errors.New("zmtp: a message is larger than the limit, or has too many frames")

// Limits bound one message of a peer.
type Limits struct {
	Frames int           // frames of a message
	Bytes  int           // of all frames of a message
	Time   time.Duration // from a message's first byte to its last, of a handshake, and of one write
}

// Conn is one connection whose messages have any number of frames: a SUB socket or a DEALER at one peer. One goroutine
// uses it; only Close may be called by others. What a peer announces takes no memory before it has come.
type Conn struct {
	conn   net.Conn
	r      *bufio.Reader
	limits Limits

	buf      []byte // of the message that was read last
	ends     []int
	frames   [][]byte
	commands int
	since    time.Time
	pongs    int
}

// Dial connects a socket of a type at HOST:PORT to a peer of one of the types. ctx and Limits.Time bound it. The caller
// must call Close.
func Dial(ctx context.Context, address, socket string, peers []string, limits Limits) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, limits.Time)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	c := newConn(conn, bufio.NewReaderSize(conn, 64<<10), limits)
	err = handshake(conn, c.r, socket, peers)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, err
	}
	return c, nil
}

func newConn(conn net.Conn, r *bufio.Reader, limits Limits) *Conn {
	return &Conn{conn: conn, r: r, limits: limits, since: time.Now()}
}

// RemoteAddr is the peer's address.
func (c *Conn) RemoteAddr() net.Addr { return c.conn.RemoteAddr() }

// Close ends the connection, and what waits for it.
func (c *Conn) Close() { _ = c.conn.Close() }

// Subscribe asks a PUB socket for all messages whose first frame begins with prefix.
func (c *Conn) Subscribe(prefix string) error { return c.Write(append([]byte{1}, prefix...)) }

// Ping asks the peer for a sign of life. The peer handles what was written before a PING first.
func (c *Conn) Ping() error { return c.write(command("PING", []byte{0, 0})) }

// Pongs counts the responses to [Conn.Ping] that were seen by [Conn.Wait] and [Conn.Read].
func (c *Conn) Pongs() int { return c.pongs }

// Write sends a message of one or more frames.
func (c *Conn) Write(frames ...[]byte) error {
	var out []byte
	for i, body := range frames {
		flags := byte(frameMore)
		if i == len(frames)-1 {
			flags = 0
		}
		if len(body) > 255 {
			out = binary.BigEndian.AppendUint64(append(out, flags|frameLong), uint64(len(body)))
		} else {
			out = append(out, flags, byte(len(body)))
		}
		out = append(out, body...)
	}
	return c.write(out)
}

func (c *Conn) write(b []byte) error {
	if err := c.conn.SetWriteDeadline(time.Now().Add(c.limits.Time)); err != nil {
		return err
	}
	_, err := c.conn.Write(b)
	return err
}

// Wait waits for a message, and reports whether one is there. It returns false without an error at a time, or earlier
// if the peer has answered a PING.
func (c *Conn) Wait(until time.Time) (bool, error) {
	for {
		if c.r.Buffered() == 0 {
			if err := c.conn.SetReadDeadline(until); err != nil {
				return false, err
			}
		}
		first, err := c.r.Peek(1)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if first[0]&frameCommand == 0 {
			return true, nil
		}
		pongs := c.pongs
		if err := c.setDeadline(); err != nil {
			return false, err
		}
		if err := c.frame(); err != nil || c.pongs > pongs {
			return false, err
		}
	}
}

// Read reads one message. Its frames are valid until the next Read. The message must come whole within Limits.Time from
// now: wait for its beginning with [Conn.Wait].
func (c *Conn) Read() ([][]byte, error) {
	if cap(c.buf) > keptBuffer {
		c.buf = nil
	}
	c.buf, c.ends, c.frames = c.buf[:0], c.ends[:0], c.frames[:0]
	if err := c.setDeadline(); err != nil {
		return nil, err
	}
	for more := true; more; {
		flags, err := c.r.Peek(1)
		if err != nil {
			return nil, err
		}
		more = flags[0]&(frameCommand|frameMore) != 0
		if err := c.frame(); err != nil {
			return nil, err
		}
	}
	from := 0
	for _, end := range c.ends {
		c.frames = append(c.frames, c.buf[from:end:end])
		from = end
	}
	return c.frames, nil
}

func (c *Conn) setDeadline() error { return c.conn.SetReadDeadline(time.Now().Add(c.limits.Time)) }

// frame reads one frame: a message's goes to the end of buf, a command is followed.
func (c *Conn) frame() error {
	flags, size, err := readHeader(c.r)
	if err != nil {
		return err
	}
	if flags&frameCommand != 0 {
		return c.command(size)
	}
	if len(c.ends) >= c.limits.Frames || size > uint64(c.limits.Bytes-len(c.buf)) {
		return ErrTooMuch
	}
	if c.buf, err = readBody(c.r, c.buf, int(size)); err != nil {
		return err
	}
	c.ends = append(c.ends, len(c.buf))
	return nil
}

// command reads a command's body: heartbeats are the only ones that matter here.
func (c *Conn) command(size uint64) error {
	if c.commands++; c.commands > maxCommands {
		if time.Since(c.since) < time.Second {
			return errPeer
		}
		c.commands, c.since = 1, time.Now()
	}
	if size > maxFrame {
		return errPeer
	}
	body, err := readBody(c.r, nil, int(size))
	if err != nil {
		return err
	}
	if bytes.HasPrefix(body, []byte("\x04PONG")) {
		c.pongs++
		return nil
	}
	return pong(c.conn, body)
}
