// SPDX-License-Identifier: Apache-2.0

package freeport

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestPortsLieBelowThoseThatTheSystemGivesAway(t *testing.T) {
	for range 5 {
		port, err := Find(3)
		require.NoError(t, err)
		assert.True(t, free(port, 3))
		assert.GreaterOrEqual(t, port, first)
		data, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
		if err != nil {
			t.Skip("only Linux tells its range: ", err)
		}
		from, err := strconv.Atoi(strings.Fields(string(data))[0])
		require.NoError(t, err)
		assert.Less(t, port+2, from)
	}
}

func TestAPortThatIsTakenIsNotFound(t *testing.T) {
	port, err := Find(2)
	require.NoError(t, err)
	for _, host := range []string{"", "127.0.0.1"} {
		ln, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port+1)))
		require.NoError(t, err)
		assert.True(t, free(port, 1))
		assert.False(t, free(port, 2), "taken at %q", host)
		require.NoError(t, ln.Close())
	}
}

// Two processes must not be given the same port, nor one process the same port twice.
func TestNobodyElseGetsAPort(t *testing.T) {
	seen := map[int]bool{}
	for range 3 * block {
		port, err := Find(1)
		require.NoError(t, err)
		require.False(t, seen[port], "%d was given twice", port)
		seen[port] = true
	}
	require.GreaterOrEqual(t, len(mine.locks), 3)
	for _, lock := range mine.locks { // so another process cannot claim the block
		_, err := net.Listen("tcp", lock.Addr().String())
		require.Error(t, err)
		begin := lock.Addr().(*net.TCPAddr).Port
		require.False(t, seen[begin])
	}
	_, err := Find(block)
	require.Error(t, err)
}
