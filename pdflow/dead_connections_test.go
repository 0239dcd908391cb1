// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

var past = time.Unix(1, 0)

// mortal connections can be made dead, all at once and without a sign: writes still succeed, but reads fail.
type mortal struct {
	net.Conn
	dead func() bool
}

func (m *mortal) Write(p []byte) (int, error) {
	if m.dead() {
		_ = m.Conn.SetReadDeadline(past)
		return len(p), nil
	}
	return m.Conn.Write(p)
}

func (m *mortal) Read(p []byte) (int, error) {
	n, err := m.Conn.Read(p)
	if m.dead() {
		return 0, &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}
	}
	return n, err
}

// No request may fail because an engine's host has crashed, or a firewall has forgotten its connections.
func TestIdleConnectionsThatDiedUnseenFailNoRequest(t *testing.T) {
	t.Parallel()
	orders := map[string]connector.KVConnector{"serial": &fake{}, "together": &fake{order: connector.Together}}
	for order, c := range orders {
		for name, netHTTP := range map[string]bool{"own": false, "net/http": true} {
			t.Run(order+", "+name, func(t *testing.T) {
				var epoch, dials atomic.Int32
				dial := func(ctx context.Context, network, address string) (net.Conn, error) {
					dials.Add(1)
					raw, err := new(net.Dialer).DialContext(ctx, network, address)
					born := epoch.Load()
					return &mortal{raw, func() bool { return epoch.Load() != born }}, err
				}
				rt := transport.New(&transport.Options{NetHTTP: netHTTP, DialContext: dial})
				defer rt.Close()
				const idle = 20
				var here sync.WaitGroup
				here.Add(2 * idle)
				var warmed atomic.Bool
				all := func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
					if !warmed.Load() {
						here.Done()
						here.Wait()
					}
					answer(ok)(x, w, r, b)
				}
				wait := all
				if order == "serial" {
					here.Add(-idle) // P's legs first
					wait = answer(ok)
				}
				x := script(t, c, all, wait, pdflow.WithTransport(rt),
					pdflow.WithRetry(config.Retry{MaxAttempts: 2}))
				var warm sync.WaitGroup
				for range idle {
					warm.Go(func() { post(t, x.url, "/v1/completions", completion("a", "")) })
				}
				warm.Wait()
				warmed.Store(true)
				require.GreaterOrEqual(t, dials.Load(), int32(idle))

				epoch.Add(1)
				for range 60 {
					require.Equal(t, 200, post(t, x.url, "/v1/completions", completion("a", "")).status)
				}
			})
		}
	}
}
