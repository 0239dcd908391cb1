// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/nettest"
)

// accepted returns a connection that a listener has accepted, and its other end.
func accepted(t *testing.T, l net.Listener) (server, client net.Conn) {
	t.Helper()
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	server, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close(); _ = server.Close() })
	return server, client
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = inner.Close() })
	return NewListener(inner)
}

// The connections do what those of net do: deadlines, Close, and reads and writes at once.
func TestConnectionsOfTheListenerAreConnections(t *testing.T) {
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		inner, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, nil, nil, err
		}
		l := NewListener(inner)
		c2, err = net.Dial("tcp", l.Addr().String())
		if err != nil {
			return nil, nil, nil, err
		}
		c1, err = l.Accept()
		return c1, c2, func() { _ = c1.Close(); _ = c2.Close(); _ = l.Close() }, err
	})
}

// A write of more than the socket takes waits for room, and what is read is what was written, whatever the sizes.
func TestWhatAConnectionCarriesIsWhole(t *testing.T) {
	for _, size := range []int{1, 1000, 64 << 10, 64<<10 + 1, 8 << 20} {
		text := strings.Repeat("0123456789abcdef", size/16+1)[:size]
		whole := func(c net.Conn) {
			got, err := io.ReadAll(c)
			require.NoError(t, err)
			if text != string(got) { // which is too long to be shown
				require.Failf(t, "not what was written", "%d of %d bytes", len(got), size)
			}
		}
		server, client := accepted(t, listen(t))
		go func() {
			for rest, piece := text, 60<<10; len(rest) > 0; piece = 160<<10 - piece { // 60 and 100 KB in turns
				n, err := io.WriteString(server, rest[:min(len(rest), piece)])
				if err != nil {
					return
				}
				rest = rest[n:]
			}
			_ = server.Close()
		}()
		time.Sleep(20 * time.Millisecond) // so that the sender meets a socket without room
		whole(client)

		receiver, sender := accepted(t, listen(t))
		go func() {
			_, _ = io.WriteString(sender, text)
			_ = sender.Close()
		}()
		whole(receiver)
	}
}

// Errors are net's own, as package net words them.
func TestErrorsOfAConnectionAreNets(t *testing.T) {
	fails := func(server net.Conn, reading, writing error) {
		_, err := server.Read(make([]byte, 10))
		opError(t, err, "read", reading)
		_, err = server.Write([]byte("x"))
		opError(t, err, "write", writing)
	}
	server, client := accepted(t, listen(t))
	reset(client)
	fails(server, syscall.ECONNRESET, syscall.EPIPE)

	server, _ = accepted(t, listen(t))
	_ = server.Close()
	fails(server, net.ErrClosed, net.ErrClosed)
}

// opError requires an error as package net makes it, around another one.
func opError(t *testing.T, err error, op string, inner error) {
	t.Helper()
	var got *net.OpError
	require.ErrorAs(t, err, &got)
	assert.Equal(t, op, got.Op)
	require.ErrorIs(t, err, inner)
	assert.ErrorContains(t, err, inner.Error())
}

// Only TCP's connections are changed.
func TestOtherListenersAreLeftAsTheyAre(t *testing.T) {
	inner, err := net.Listen("unix", t.TempDir()+"/s")
	require.NoError(t, err)
	l := NewListener(inner)
	go func() {
		c, err := net.Dial("unix", inner.Addr().String())
		if err == nil {
			_ = c.Close()
		}
	}()
	c, err := l.Accept()
	require.NoError(t, err)
	assert.IsType(t, &net.UnixConn{}, c)
	_ = c.Close()
	require.NoError(t, l.Close())
	_, err = l.Accept()
	assert.ErrorIs(t, err, net.ErrClosed)
}

// A stream that waits for its next part can wait without a buffer: see WaitReadable of a response's body.
func TestABodyWaitsForItsNextPart(t *testing.T) {
	turns := make(chan chan string, 1)
	engine := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next := <-turns
		for {
			select {
			case part, ok := <-next:
				if !ok {
					panic(http.ErrAbortHandler)
				}
				_, _ = io.WriteString(w, part)
				_ = http.NewResponseController(w).Flush()
			case <-r.Context().Done():
				return
			}
		}
	})
	server := newServer(t, engine)
	tr := New(nil)
	defer func() { _ = tr.Close() }()

	begin := func(ctx context.Context) (*http.Response, interface{ WaitReadable() }, chan string) {
		next := make(chan string)
		turns <- next
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, nil)
		require.NoError(t, err)
		go func() { next <- "first" }()
		resp := roundTrip(t, tr, req)
		waiter, ok := resp.Body.(interface{ WaitReadable() })
		require.True(t, ok)
		return resp, waiter, next
	}
	waiting := func(w interface{ WaitReadable() }) <-chan struct{} {
		came := make(chan struct{})
		go func() { w.WaitReadable(); close(came) }()
		return came
	}
	read := func(resp *http.Response) string {
		p := make([]byte, 100)
		n, err := resp.Body.Read(p)
		require.NoError(t, err)
		return string(p[:n])
	}

	resp, w, next := begin(t.Context())
	w.WaitReadable()
	assert.Equal(t, "first", read(resp))
	came := waiting(w)
	if runtime.GOOS == "linux" { // elsewhere it never waits
		select {
		case <-came:
			require.Fail(t, "it returned, and there is nothing to read")
		case <-time.After(50 * time.Millisecond):
		}
	}
	next <- "second"
	<-came
	w.WaitReadable() // again, with something to read
	assert.Equal(t, "second", read(resp))

	// The engine breaks off: WaitReadable returns, and Read says so.
	go close(next)
	w.WaitReadable()
	_, err := resp.Body.Read(make([]byte, 100))
	var e *Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, SentAnswered, e.Sent)
	w.WaitReadable() // returns at once
	_ = resp.Body.Close()

	// Close ends it, and so does the request's context.
	for want, end := range map[error]func(resp *http.Response, cancel context.CancelFunc){
		http.ErrBodyReadAfterClose: func(resp *http.Response, _ context.CancelFunc) {
			require.NoError(t, resp.Body.Close())
		},
		context.Canceled: func(_ *http.Response, cancel context.CancelFunc) { cancel() },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		resp, w, _ = begin(ctx)
		assert.Equal(t, "first", read(resp))
		came = waiting(w)
		time.Sleep(20 * time.Millisecond)
		end(resp, cancel)
		<-came
		_, err = resp.Body.Read(make([]byte, 100))
		require.ErrorIs(t, err, want)
		_ = resp.Body.Close()
		cancel()
	}
}

// A body that ends early, or ends with its connection, is read after a wait as it is without one.
func TestABodyEndsAfterAWaitAsWithoutOne(t *testing.T) {
	for name, c := range map[string]struct {
		head string
		end  error
	}{
		"length":      {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", io.EOF},
		"cut short":   {"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", io.ErrUnexpectedEOF},
		"until close": {"HTTP/1.0 200 OK\r\n\r\n", io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, func(e *engine, conn net.Conn) {
				e.read(bufio.NewReader(conn))
				_, _ = io.WriteString(conn, c.head)
				time.Sleep(20 * time.Millisecond)
				_, _ = io.WriteString(conn, "hello")
			})
			tr := New(nil)
			defer tr.Close()
			resp, err := tr.RoundTrip(post(t, e.url(), ""))
			require.NoError(t, err)
			defer resp.Body.Close()
			var got []byte
			for err == nil {
				resp.Body.(interface{ WaitReadable() }).WaitReadable()
				p := make([]byte, 3)
				var n int
				n, err = resp.Body.Read(p)
				got = append(got, p[:n]...)
			}
			assert.Equal(t, "hello", string(got))
			assert.ErrorIs(t, err, c.end)
		})
	}
}
