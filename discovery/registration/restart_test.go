// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/freeport"
)

// ownAddress is one that nobody else gets while its listener is dead.
func ownAddress(t *testing.T) string {
	t.Helper()
	port, err := freeport.One()
	require.NoError(t, err)
	return "127.0.0.1:" + port
}

func TestADeadListenerIsToldOfAndRestarted(t *testing.T) {
	for name, fail := range map[string]func(r *running){
		"ZeroMQ": func(r *running) { r.zmq.Fail() }, "HTTP": func(r *running) { r.ln.Fail() },
	} {
		t.Run(name, func(t *testing.T) {
			s, err := New(&Options{Listen: ownAddress(t), HTTP: ownAddress(t)})
			require.NoError(t, err)
			require.NoError(t, s.Err(), "before Start")
			require.NoError(t, s.Start(t.Context()))
			defer func() { assert.NoError(t, s.Close()) }()
			require.NoError(t, s.Err())
			address := map[string]string{"ZeroMQ": s.Addr(), "HTTP": s.HTTPAddr()}[name]
			var other net.Listener // so that the address cannot be bound again
			require.Eventually(t, func() bool {
				fail(s.run)
				other, err = net.Listen("tcp", address)
				return err == nil
			}, 10*time.Second, time.Millisecond)
			require.Eventually(t, func() bool { return s.Err() != nil }, 10*time.Second, time.Millisecond)
			require.ErrorContains(t, s.Err(), "registration: "+name)
			require.NoError(t, other.Close())
			require.Eventually(t, func() bool {
				conn, err := net.Dial("tcp", address)
				if err == nil {
					_ = conn.Close()
				}
				return err == nil && s.Err() == nil
			}, 10*time.Second, time.Millisecond)
		})
	}
}
