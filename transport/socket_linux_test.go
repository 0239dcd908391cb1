// SPDX-License-Identifier: Apache-2.0

//go:build linux

package transport

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/transport/internal/rawsocket"
)

// Both sides of a gateway have the connections that NewListener speaks of.
func TestConnectionsAreSockets(t *testing.T) {
	server, _ := accepted(t, listen(t))
	assert.Implements(t, (*rawsocket.PooledReader)(nil), server)
	ownOnly(t, "has a pool of its own, which cannot be looked into")
	e := newEngine(t, keepAlive)
	tr := newTransport(t, nil)
	exchange(t, tr, post(t, e.url(), "x"))
	idle := tr.pool.hosts[hostKey{host: e.Addr().String()}]
	require.Len(t, idle, 1)
	assert.Implements(t, (*rawsocket.PooledReader)(nil), idle[0].rw)
	assert.NotNil(t, idle[0].lazy)
}

// os.File.Fd makes the socket blocking, for whoever has it. A raw call that blocks would stop the whole program.
func TestASocketThatSomebodyMadeBlockingDoesNotBlock(t *testing.T) {
	server, client := accepted(t, listen(t))
	file, err := server.(interface{ File() (*os.File, error) }).File()
	require.NoError(t, err)
	defer file.Close()
	_ = file.Fd()
	require.NoError(t, server.SetDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = server.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	big := make([]byte, 60<<10)
	for err = nil; err == nil; { // until there is no room
		_, err = server.Write(big)
	}
	opError(t, err, "write", os.ErrDeadlineExceeded)
	_ = client.Close()
}

const echoAddress = "PDKIT_TEST_ECHO_ADDRESS"

// TestEchoClient is the client of the test below, in a process of its own.
func TestEchoClient(t *testing.T) {
	address := os.Getenv(echoAddress)
	if address == "" {
		t.Skip("it is not run by itself")
	}
	dial := func() net.Conn {
		c, err := net.Dial("tcp", address)
		require.NoError(t, err)
		return c
	}
	echo, busy := dial(), dial()
	ping := func() time.Duration {
		begin := time.Now()
		_, err := echo.Write([]byte("e"))
		require.NoError(t, err)
		_, err = io.ReadFull(echo, make([]byte, 1))
		require.NoError(t, err)
		return time.Since(begin)
	}
	for range 50 {
		ping()
	}
	time.Sleep(300 * time.Millisecond) // the monitor sleeps
	_, err := busy.Write([]byte("c"))
	require.NoError(t, err)
	time.Sleep(20 * time.Millisecond)
	fmt.Printf("the echo took %d ms\n", ping().Milliseconds())
}

// Raw calls do not wake the runtime's monitoring thread. While it sleeps, a goroutine that computes holds all others
// up.
func TestAGoroutineThatComputesHoldsNoConnectionUp(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	l := listen(t)
	var over atomic.Bool
	var running sync.WaitGroup
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				for p := make([]byte, 1); ; {
					if _, err := c.Read(p); err != nil {
						return
					}
					for begin := time.Now(); p[0] == 'c' && !over.Load() && time.Since(begin) < 2*time.Second; {
						runtime.KeepAlive(p)
					}
					_, _ = c.Write(p)
				}
			})
		}
	})
	client := exec.Command(os.Args[0], "-test.run=^TestEchoClient$", "-test.v")
	client.Env = append(os.Environ(), echoAddress+"="+l.Addr().String())
	out, err := client.Output()
	over.Store(true)
	_ = l.Close()
	running.Wait()
	require.NoError(t, err, string(out))
	var took int
	_, after, found := strings.Cut(string(out), "the echo took ")
	require.True(t, found, string(out))
	_, err = fmt.Sscan(after, &took)
	require.NoError(t, err)
	assert.Less(t, took, 1000, "ms; without the monitor it is what is left of 2,000")
}
