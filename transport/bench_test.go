// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// stubEngine answers any number of requests on raw connections, without an allocation for each.
func stubEngine(b *testing.B) string {
	e := newEngine(b, func(_ *engine, c net.Conn) {
		r := bufio.NewReaderSize(c, 64<<10)
		for {
			length := 0
			for {
				line, err := r.ReadSlice('\n')
				if err != nil {
					return
				}
				if len(line) <= 2 {
					break
				}
				if n, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
					for _, d := range bytes.TrimSpace(n) {
						length = length*10 + int(d-'0')
					}
				}
			}
			if _, err := r.Discard(length); err != nil {
				return
			}
			if _, err := io.WriteString(c, okResponse); err != nil {
				return
			}
		}
	})
	return e.url()
}

func benchmarkRequests(b *testing.B, size int, send func(*http.Request) (*http.Response, error), url string) {
	b.Helper()
	payload := make([]byte, size)
	buf := make([]byte, 512)
	b.ReportAllocs()
	b.SetBytes(int64(size))
	for b.Loop() {
		req, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(payload))
		require.NoError(b, err)
		resp, err := send(req)
		require.NoError(b, err)
		for err == nil {
			_, err = resp.Body.Read(buf)
		}
		require.NoError(b, resp.Body.Close())
	}
}

var sizes = []struct {
	name  string
	bytes int
}{{"2KB", 2 << 10}, {"128KB", 128 << 10}, {"1MB", 1 << 20}}

// BenchmarkRoundTrip shows a round trip, the engine's side included, beside one of net/http's own transport with the
// same pool. Run it with -cpu 1.
func BenchmarkRoundTrip(b *testing.B) {
	for _, size := range sizes {
		b.Run(size.name+"/nethttp", func(b *testing.B) {
			rt := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 256}
			b.Cleanup(rt.CloseIdleConnections)
			benchmarkRequests(b, size.bytes, rt.RoundTrip, stubEngine(b))
		})
		b.Run(size.name+"/transport", func(b *testing.B) {
			benchmarkRequests(b, size.bytes, newTransport(b, nil).RoundTrip, stubEngine(b))
		})
	}
}

// BenchmarkOpenStream reports memory held by each stream that waits for its next chunk, both sides of the connection in
// one process.
func BenchmarkOpenStream(b *testing.B) {
	e := newEngine(b, func(e *engine, c net.Conn) {
		r := bufio.NewReaderSize(c, 256)
		if e.read(r) {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
			_, _ = r.ReadByte()
		}
	})
	const streams = 500
	for b.Loop() {
		tr := New(nil)
		before := inUse()
		responses := make([]*http.Response, streams)
		for i := range responses {
			resp := roundTrip(b, tr, post(b, e.url(), "x"))
			responses[i] = resp
		}
		b.ReportMetric(float64(inUse()-before)/streams, "B/stream")
		for _, resp := range responses {
			_ = resp.Body.Close()
		}
		_ = tr.Close()
	}
}

func inUse() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}
