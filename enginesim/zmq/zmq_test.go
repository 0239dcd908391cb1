// SPDX-License-Identifier: Apache-2.0

package zmq_test

import (
	"bytes"
	"context"
	"io"
	"log"
	"net"
	"testing"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim/zmq"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The other side is another implementation.
func TestAnotherImplementationHearsEachFrame(t *testing.T) {
	for socketType, open := range map[string]func(context.Context, ...zmq4.Option) zmq4.Socket{
		"PUSH": zmq4.NewPull, "DEALER": zmq4.NewRouter,
	} {
		ctx, cancel := context.WithCancel(t.Context())
		peer := open(ctx, zmq4.WithLogger(log.New(io.Discard, "", 0)))
		require.NoError(t, peer.Listen("tcp://127.0.0.1:0"))
		s, err := zmq.Dial(t.Context(), socketType, peer.Addr().String(), "engine")
		require.NoError(t, err)
		long := bytes.Repeat([]byte("x"), 70_000)
		require.NoError(t, s.Send([]byte("a"), long, nil))
		require.NoError(t, s.Send([]byte("last")))
		require.NoError(t, s.Close())
		for _, want := range [][][]byte{{[]byte("a"), long, {}}, {[]byte("last")}} {
			m, err := peer.Recv()
			require.NoError(t, err, socketType)
			if socketType == "DEALER" {
				require.Equal(t, "engine", string(m.Frames[0]), "a ROUTER tells who sent it")
				m.Frames = m.Frames[1:]
			}
			assert.Equal(t, want, m.Frames, socketType)
		}
		_ = peer.Close()
		cancel()
	}
}

func TestWhoSpeaksAnotherProtocolIsNoPeer(t *testing.T) {
	for _, says := range []string{
		"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n                        ",
		"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00PLAIN" + string(make([]byte, 47)),
		"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + string(make([]byte, 48)) + "\x04\x06\x05ERROR",
		"\xff\x00\x00",
	} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		go func() {
			conn, err := ln.Accept()
			if err == nil {
				_, _ = io.WriteString(conn, says)
				_, _ = io.CopyN(io.Discard, conn, 64)
				_ = conn.Close()
			}
		}()
		_, err = zmq.Dial(t.Context(), "PUSH", ln.Addr().String(), "")
		assert.Error(t, err, "%q", says)
		_ = ln.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := zmq.Dial(ctx, "PUSH", "127.0.0.1:1", "")
	assert.ErrorIs(t, err, context.Canceled)
}
