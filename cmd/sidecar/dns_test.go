// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// nameServer answers every query for IPv4 addresses with 127.0.0.1, and all other queries with nothing.
func nameServer(t *testing.T) string {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	t.Cleanup(func() { _ = conn.Close(); <-done })
	go func() {
		defer close(done)
		q := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(q)
			if err != nil {
				return
			}
			end := 12 // where the queried name ends
			for end < n && q[end] != 0 {
				end += 1 + int(q[end])
			}
			if end+5 > n {
				continue
			}
			a := append([]byte{q[0], q[1], 0x84, 0, 0, 1, 0, 0, 0, 0, 0, 0}, q[12:end+5]...)
			if binary.BigEndian.Uint16(q[end+1:]) == 1 { // A
				a[7] = 1
				a = append(a, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, 1)
			}
			_, _ = conn.WriteTo(a, from)
		}
	}()
	return conn.LocalAddr().String()
}

// A headless service has the pods of prefill engines. The scheduler names them by address, and so does the list.
func TestTheListCanBeAName(t *testing.T) {
	p, d := twoEngines(t, enginesim.Config{}, enginesim.Config{})
	x := before(t, d.URL(), nil, "--prefillers-dns=prefill.pool.svc.cluster.local:"+portOf(t, p.URL()),
		"--prefillers-dns-server="+nameServer(t))
	send := func(to string) int {
		return statusOf(complete(t, x.addr, 0, false, header, to))
	}
	require.Eventually(t, func() bool { return send(hostPort(t, p.URL())) == http.StatusOK }, 20*time.Second,
		10*time.Millisecond, "%s", x.log)
	require.Equal(t, http.StatusForbidden, send("127.0.0.1:1"))
	require.Equal(t, http.StatusForbidden, send("127.0.0.2:"+portOf(t, p.URL())))
}
