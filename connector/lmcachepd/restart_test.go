// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/lmcachepd"
)

// While the address is taken by somebody else the connector is not healthy; afterwards it receives notices again.
func TestADeadListenerIsNotHealthyAndIsRestarted(t *testing.T) {
	c := start(t, lmcachepd.Options{NotifyListen: freePort(t)})
	s, wait, done := armed(t, c)
	defer done(nil)
	var other net.Listener
	require.Eventually(t, func() bool { // the connector may be faster and take its address first
		c.FailListener()
		ln, err := net.Listen("tcp", c.Addr())
		other = ln
		return err == nil
	}, 20*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return c.HealthCheck(t.Context()) != nil }, 20*time.Second, time.Millisecond)
	require.ErrorContains(t, c.HealthCheck(t.Context()), "is being restarted")
	require.NoError(t, other.Close())
	require.Eventually(t, func() bool { return c.HealthCheck(t.Context()) == nil }, 20*time.Second, time.Millisecond)
	push := pusher(t, c.Addr())
	push(notice(t, s.ID))
	push(notice(t, s.ID)) // of the second rank
	_, err := wait(t.Context())
	require.NoError(t, err)
}
