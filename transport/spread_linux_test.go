// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// processes are n listeners on one port, as an engine with several API servers has. The kernel chooses one for each
// connection. Each answers with its number, after takes.
func processes(t *testing.T, n int, takes time.Duration) (url string) {
	const reusePort = 0xf // SO_REUSEPORT
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if failed := c.Control(func(fd uintptr) {
			err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, reusePort, 1)
		}); failed != nil {
			return failed
		}
		return err
	}}
	address := "127.0.0.1:0"
	for i := range n {
		l, err := config.Listen(context.Background(), "tcp", address)
		require.NoError(t, err)
		address = l.Addr().String()
		newServer(t, func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(takes)
			_, _ = fmt.Fprint(w, i, " ", r.RemoteAddr)
		}, func(s *httptest.Server) {
			_ = s.Listener.Close()
			s.Listener = l
		})
	}
	return "http://" + address
}

// singles sends requests one after another, and counts processes and connections that have served them.
func singles(t *testing.T, tr http.RoundTripper, url string, requests int, pause time.Duration) (process, conns int) {
	seen, ports := map[string]int{}, map[string]int{}
	for range requests {
		var p, port string
		_, err := fmt.Sscan(exchange(t, tr, post(t, url, "x")), &p, &port)
		require.NoError(t, err)
		seen[p]++
		ports[port]++
		time.Sleep(pause)
	}
	return len(seen), len(ports)
}

// After a burst, single requests go to all processes of the engine, not to the one whose connection was used last.
func TestSingleRequestsReachAllProcessesBehindAPort(t *testing.T) {
	ownOnly(t, "uses the connection that was used last")
	for pause, least := range map[time.Duration]int{0: 10, 2 * time.Millisecond: 20, 20 * time.Millisecond: 20} {
		url := processes(t, 8, 5*time.Millisecond)
		tr := newTransport(t, nil)
		burst(t, tr, url, 64)
		process, conns := singles(t, tr, url, 40, pause)
		assert.GreaterOrEqual(t, conns, least, pause)
		assert.GreaterOrEqual(t, process, 4, pause)
	}
}

// A connection that is never idle for long ends some day, and the kernel chooses again.
func TestAConnectionGetsNoOlderThanItsAge(t *testing.T) {
	bothClients(t, func(t *testing.T, options Options) {
		url := processes(t, 8, time.Millisecond)
		options.MaxConnectionAge = 50 * time.Millisecond
		process, conns := singles(t, newTransport(t, &options), url, 300, time.Millisecond)
		assert.GreaterOrEqual(t, conns, 10)
		assert.GreaterOrEqual(t, process, 3)
	})
}

// Age cuts no response, and no request fails because its connection was too old.
func TestAgeCutsNothing(t *testing.T) {
	bothClients(t, func(t *testing.T, options Options) {
		s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			for range 5 {
				_, _ = io.WriteString(w, "part ")
				_ = http.NewResponseController(w).Flush()
				time.Sleep(time.Millisecond)
			}
		})
		options.MaxConnectionAge = time.Millisecond
		tr := newTransport(t, &options)
		done := make(chan int)
		for range 8 {
			go func() {
				whole := 0
				for range 50 {
					if resp, err := tr.RoundTrip(post(t, s.URL, "x")); err == nil {
						if b, err := io.ReadAll(resp.Body); err == nil && len(b) == 25 {
							whole++
						}
						_ = resp.Body.Close()
					}
				}
				done <- whole
			}()
		}
		for range 8 {
			assert.Equal(t, 50, <-done)
		}
	})
}

// The connections of a burst do not end together.
func TestAgesDiffer(t *testing.T) {
	o := (*Options)(nil).withDefaults()
	seen := map[time.Time]bool{}
	for range 20 {
		ends := o.connectionEnds()
		assert.WithinRange(t, ends, time.Now().Add(4*time.Minute-time.Second), time.Now().Add(5*time.Minute))
		seen[ends.Truncate(time.Second)] = true
	}
	assert.Greater(t, len(seen), 5)
	o.MaxConnectionAge = -1
	assert.Zero(t, o.connectionEnds())
}
