// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestADeadZeroMQListenerIsRestarted(t *testing.T) {
	s, err := New(&Options{Listen: "127.0.0.1:0"})
	require.NoError(t, err)
	require.NoError(t, s.Start(t.Context()))
	defer func() { assert.NoError(t, s.Close()) }()
	s.run.zmq.Fail()
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", s.Addr())
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	}, 10*time.Second, time.Millisecond)
}
