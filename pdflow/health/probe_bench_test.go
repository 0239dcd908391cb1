// SPDX-License-Identifier: Apache-2.0

//go:build unix

package health_test

import (
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/health"
)

// BenchmarkProbe says what one probe costs in processor time, with the smallest of servers on the other end (whose
// own part, a read and a write, is included: it runs in this process).
func BenchmarkProbe(b *testing.B) {
	probes := make(chan struct{}, 1<<16)
	var urls []string
	for range 64 {
		urls = append(urls, rawServer(b, probes))
	}
	serve(b, &health.Options{Interval: 20 * time.Millisecond}, urls...) // 3,200 a second
	for range 256 {
		<-probes // connections are open
	}
	b.ReportAllocs()
	before := cpu(b)
	for b.Loop() {
		<-probes
	}
	b.ReportMetric(float64(cpu(b)-before)/float64(b.N)/1e3, "cpu-µs/probe")
}

// rawServer answers every read with an empty 200.
func rawServer(b *testing.B, probes chan<- struct{}) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	b.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for buf := make([]byte, 1024); ; {
					if _, err := c.Read(buf); err != nil {
						return
					}
					if _, err := c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")); err != nil {
						return
					}
					select {
					case probes <- struct{}{}:
					default:
					}
				}
			}()
		}
	}()
	return "http://" + ln.Addr().String()
}

func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
