// SPDX-License-Identifier: Apache-2.0

package zmtp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/zmq"
	"github.com/pdkit/pdkit/internal/zmtp"
)

var limits = zmtp.Limits{Frames: 4, Bytes: 1 << 20, Time: 10 * time.Second}

func subscriber(t *testing.T, address string) *zmtp.Conn {
	t.Helper()
	c, err := zmtp.Dial(t.Context(), address, "SUB", []string{"PUB", "XPUB"}, limits)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	require.NoError(t, c.Subscribe("kv"))
	require.NoError(t, c.Ping())
	come, err := c.Wait(time.Now().Add(10 * time.Second))
	require.NoError(t, err)
	require.False(t, come)
	require.Equal(t, 1, c.Pongs(), "the PING is answered after the subscription was read")
	return c
}

func TestASubscriberGetsAllFramesOfItsTopic(t *testing.T) {
	pub, err := zmq.ListenPUB("127.0.0.1:0", 100)
	require.NoError(t, err)
	defer pub.Close()
	c := subscriber(t, pub.Addr())
	long := bytes.Repeat([]byte("x"), 900<<10)
	pub.Publish([]byte("load"), []byte("not wanted"))
	pub.Publish([]byte("kv@1"), long, nil)
	pub.Publish([]byte("kv@1"), []byte("next"))
	for _, want := range [][][]byte{{[]byte("kv@1"), long, {}}, {[]byte("kv@1"), []byte("next")}} {
		come, err := c.Wait(time.Now().Add(10 * time.Second))
		require.NoError(t, err)
		require.True(t, come)
		got, err := c.Read()
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	come, err := c.Wait(time.Now().Add(20 * time.Millisecond))
	require.NoError(t, err)
	assert.False(t, come, "a wait that ends leaves the connection as it is")
	pub.Publish([]byte("kv"), []byte("after"))
	got, err := c.Read()
	require.NoError(t, err)
	assert.Equal(t, [][]byte{[]byte("kv"), []byte("after")}, got)
}

func TestADealerAsksARouter(t *testing.T) {
	router, err := zmq.ListenROUTER("127.0.0.1:0", func(p *zmq.Peer, frames [][]byte) {
		if len(frames) == 2 {
			for seq := binary.BigEndian.Uint64(frames[1]); seq < 7; seq++ {
				_ = p.Send(nil, binary.BigEndian.AppendUint64(nil, seq))
			}
		}
	})
	require.NoError(t, err)
	defer router.Close()
	c, err := zmtp.Dial(t.Context(), router.Addr(), "DEALER", []string{"ROUTER"}, limits)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.Write(nil, binary.BigEndian.AppendUint64(nil, 5)))
	for _, want := range []uint64{5, 6} {
		got, err := c.Read()
		require.NoError(t, err)
		assert.Equal(t, [][]byte{{}, binary.BigEndian.AppendUint64(nil, want)}, got)
	}
}

// peer accepts one connection as a PUB socket, and says what follows.
func peer(t *testing.T, says string) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	t.Cleanup(func() { _ = ln.Close(); <-done })
	go func() {
		defer close(done)
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = conn.Write([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x00NULL" + string(make([]byte, 48)) +
			"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB" + says))
		_, _ = conn.Read(make([]byte, 1<<10))
		_, _ = conn.Read(make([]byte, 1<<10))
		_, _ = conn.Read(make([]byte, 1<<10)) // until the other side closes
	}()
	return ln.Addr().String()
}

func TestAMessageHasLimits(t *testing.T) {
	short := zmtp.Limits{Frames: 3, Bytes: 300, Time: 300 * time.Millisecond}
	for name, c := range map[string]struct {
		says string
		ok   bool
	}{
		"within them":     {"\x01\x01a\x01\x01b\x00\x01c", true},
		"too many frames": {"\x01\x01a\x01\x01b\x01\x01c\x00\x01d", false},
		"too many bytes": {"\x01\xffa" + string(make([]byte, 254)) + "\x00\xff" + string(make([]byte, 255)),
			false},
		"a header alone":        {"\x02\x7f\xff\xff\xff\xff\xff\xff\xff", false},
		"it never ends":         {"\x01\x01a", false},
		"unknown bits":          {"\x08\x01a", false},
		"heartbeats in between": {"\x01\x01a\x04\x07\x04PING\x00\x00\x00\x01c", true},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := zmtp.Dial(t.Context(), peer(t, c.says), "SUB", []string{"PUB"}, short)
			require.NoError(t, err)
			defer conn.Close()
			_, err = conn.Read()
			assert.Equal(t, c.ok, err == nil, "%v", err)
		})
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // it accepts, and says nothing
	require.NoError(t, err)
	defer ln.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = zmtp.Dial(ctx, ln.Addr().String(), "SUB", []string{"PUB"}, limits)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestABoundSubscriberReadsConnectingPublishers(t *testing.T) {
	got := make(chan string, 10)
	l, err := zmtp.Listen(t.Context(), "127.0.0.1:0", zmtp.Config{
		Socket: "SUB", Peers: []string{"PUB", "XPUB"}, Refused: func() {}, Limits: limits,
		Serve: func(c *zmtp.Conn, useful func()) {
			if c.Subscribe("") != nil {
				return
			}
			for {
				frames, err := c.Read()
				if err != nil {
					return
				}
				useful()
				got <- string(bytes.Join(frames, []byte("|")))
			}
		},
	})
	require.NoError(t, err)
	defer l.Close()
	pub, err := zmq.Dial(t.Context(), "PUB", l.Addr().String(), "")
	require.NoError(t, err)
	defer pub.Close()
	require.NoError(t, pub.Send([]byte("kv"), []byte("1"), []byte("x")))
	assert.Equal(t, "kv|1|x", <-got)
}
