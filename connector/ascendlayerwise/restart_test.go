// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise

import (
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/freeport"
)

// While the address is taken by somebody else the connector is not healthy; afterwards it receives callbacks again.
func TestADeadServerIsNotHealthyAndIsRestarted(t *testing.T) {
	port, err := freeport.One()
	require.NoError(t, err)
	c, err := New(&Options{CallbackListen: "127.0.0.1:" + port})
	require.NoError(t, err)
	require.NoError(t, c.Start(t.Context()))
	defer func() { assert.NoError(t, c.Close()) }()
	s := c.running()
	var other net.Listener
	require.Eventually(t, func() bool { // the connector may be faster and take its address first
		s.ln.Fail()
		ln, err := net.Listen("tcp", s.address())
		other = ln
		return err == nil
	}, 20*time.Second, time.Millisecond)
	require.Eventually(t, func() bool { return c.HealthCheck(t.Context()) != nil }, 20*time.Second, time.Millisecond)
	assert.ErrorContains(t, c.HealthCheck(t.Context()), "is being restarted")
	assert.NotContains(t, c.HealthCheck(t.Context()).Error(), s.address())
	require.NoError(t, other.Close())
	require.Eventually(t, func() bool { return c.HealthCheck(t.Context()) == nil }, 20*time.Second, time.Millisecond)
	got, err := http.Post("http://"+s.address()+callbackPath, "application/json",
		strings.NewReader(`{"request_id":"chatcmpl-unknown"}`))
	require.NoError(t, err)
	defer got.Body.Close()
	assert.Equal(t, http.StatusNotFound, got.StatusCode, "the server says that nobody waits for this id")
}
