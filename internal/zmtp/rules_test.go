// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/relisten"
)

// edited is the greeting with one byte changed.
func edited(at int, to byte) string {
	g := greeting
	g[at] = to
	return string(g[:])
}

func TestWhoIsLetIn(t *testing.T) {
	hello, push := string(greeting[:]), string(ready("PUSH"))
	for name, c := range map[string]struct {
		says string
		ok   bool
	}{
		"a socket that is admitted": {hello + push, true},
		"a later version":           {edited(10, 4) + push, true},
		"a later minor version":     {edited(11, 1) + push, true},
		"its name of properties in small": {hello + string(command("READY", property("socket-type", "PUSH"))),
			true},
		"it says more of itself": {hello +
			string(command("READY", append(property("Identity", "x"), property("Socket-Type", "PUSH")...))), true},
		"another socket":   {hello + string(ready("PULL")), false},
		"no socket's type": {hello + string(command("READY", nil)), false},
		"a type that is longer than the frame": {hello +
			string(command("READY", []byte("\x0bSocket-Type\xff\xff\xff\xffPUSH"))), false},
		"another command": {hello + string(command("ERROR", property("Socket-Type", "PUSH"))),
			false},
		"a message in its place": {hello + "\x00" + push[1:], false},
		"version 2":              {edited(10, 1) + push, false},
		"no signature's end":     {edited(9, 0x7e) + push, false},
		"another mechanism":      {edited(12, 'P') + push, false},
		"another protocol":       {"GET / HTTP/1.1\r\n\r\n", false},
	} {
		p := &said{in: bytes.NewReader([]byte(c.says))}
		err := handshake(p, bufio.NewReader(p), "PULL", []string{"PUSH"})
		if c.ok {
			assert.NoError(t, err, name)
		} else {
			assert.ErrorIs(t, err, errPeer, name)
		}
	}
}

func TestWhatFramesMayBe(t *testing.T) {
	for name, c := range map[string]struct {
		frame string
		want  error
		n     int
	}{
		"short": {"\x00\x01a", nil, 1},
		"long":  {"\x02\x00\x00\x00\x00\x00\x00\x00\x01a", nil, 1},
		"as long as may be": {"\x02\x00\x00\x00\x00\x00\x00\x10\x00" + strings.Repeat("a", maxFrame), nil,
			maxFrame},
		"longer":                {"\x02\x00\x00\x00\x00\x00\x00\x10\x01" + strings.Repeat("a", maxFrame+1), errPeer, 0},
		"longer than all there": {"\x02\xff\xff\xff\xff\xff\xff\xff\xff", errPeer, 0},
		"unknown bits":          {"\x08\x01a", errPeer, 0},
		"cut":                   {"\x00\x05abc", io.ErrUnexpectedEOF, 3},
	} {
		_, body, err := readFrame(bufio.NewReader(strings.NewReader(c.frame)), make([]byte, 256))
		assert.ErrorIs(t, err, c.want, name)
		assert.Len(t, body, c.n, name)
	}
}

// A PING's context comes back; what is longer than a context may be is no heartbeat.
func TestHeartbeatsAreAnswered(t *testing.T) {
	p := &said{
		in: bytes.NewReader(
			append(command("PING", []byte("\x00\x64ctx")),
				command("PING", []byte("\x00\x64"+strings.Repeat("c", 17)))...),
		),
	}
	err := readMessages(p, bufio.NewReader(p), func([]byte) { assert.Fail(t, "a message") })
	assert.ErrorIs(t, err, io.EOF)
	assert.Equal(t, string(command("PONG", []byte("ctx"))), p.out.String())
}

// pipes is a listener inside a bubble of fake time.
type pipes struct {
	net.Listener
	conns chan net.Conn
	once  sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	conn, open := <-p.conns
	if !open {
		return nil, net.ErrClosed
	}
	return conn, nil
}

func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

func (p *pipes) Close() error { p.once.Do(func() { close(p.conns) }); return nil }

// A handshake has ten seconds; after it a peer may be silent for as long as it likes.
func TestAHandshakeIsBoundedAndSilenceIsNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, got, refused := &pipes{conns: make(chan net.Conn)}, make(chan string, 1), atomic.Int32{}
		l := On(relisten.On(p), Config{
			Socket: "PULL", Peers: []string{"PUSH"}, Refused: func() { refused.Add(1) },
			Peer: func(<-chan struct{}) func([]byte) bool {
				return func(body []byte) bool { got <- string(body); return true }
			},
		})
		dial := func() net.Conn {
			here, there := net.Pipe()
			p.conns <- here
			go func() { _, _ = io.Copy(io.Discard, there) }() // what it is told
			return there
		}
		slow, good := dial(), dial()
		_, err := slow.Write(greeting[:20])
		require.NoError(t, err)
		_, err = good.Write(append(greeting[:], ready("PUSH")...))
		require.NoError(t, err)
		time.Sleep(handshakeTimeout - time.Millisecond)
		synctest.Wait()
		assert.Zero(t, refused.Load())
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		assert.EqualValues(t, 1, refused.Load())
		time.Sleep(time.Hour)
		_, err = good.Write([]byte("\x00\x02hi"))
		require.NoError(t, err)
		assert.Equal(t, "hi", <-got)
		l.Close()
		_, _ = slow.Close(), good.Close()
	})
}

// Who waits for the peer's end is told of it by Close, which waits for him in turn.
func TestCloseEndsWhoWaitsForThePeersEnd(t *testing.T) {
	waits := make(chan struct{})
	l, err := Listen(t.Context(), "127.0.0.1:0", Config{
		Socket: "PULL", Peers: []string{"PUSH"}, Refused: func() {},
		Peer: func(gone <-chan struct{}) func([]byte) bool {
			return func([]byte) bool { close(waits); <-gone; return true }
		},
	})
	require.NoError(t, err)
	conn, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Write(append(append(greeting[:], ready("PUSH")...), "\x00\x01a"...))
	require.NoError(t, err)
	<-waits
	closed := make(chan struct{})
	go func() { defer close(closed); l.Close() }()
	select {
	case <-closed:
	case <-time.After(20 * time.Second):
		require.Fail(t, "Close waits for ever")
	}
}
