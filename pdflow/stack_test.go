// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

// A stream keeps all the stack that its request has needed, in steps of 4, 8 and 16 KB, and there are thousands of
// them. Over pdkit's own transport a request makes do with 8 KB, though it opens connections to both engines.
func TestAStreamKeepsLittleStack(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector makes frames larger")
	}
	own := transport.New(nil)
	defer func() { _ = own.Close() }()
	p := bareEngine(t, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 27\r\n"+
		"Connection: close\r\n\r\n"+ok)
	d := bareEngine(t, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"+
		`data: {"choices":[{"index":0,"text":"t"}]}`+"\n\n"+`data: {"choices":[{"index":0,"text":"t"}]}`+"\n\n")
	flow, _ := newFlow(t, &fake{}, []discovery.Endpoint{endpoint(t, p, discovery.RolePrefill),
		endpoint(t, d, discovery.RoleDecode)}, pdflow.WithTransport(own))

	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // collections make stacks smaller
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))  // each processor keeps some stacks in store
	const streams = 200
	arrived, leave := make(chan string, streams), make(chan struct{})
	defer close(leave)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range streams {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions",
			strings.NewReader(completion("a", `"stream":true`)))
		r.Header.Set("Content-Type", "application/json")
		go likeServer(7, func() { flow.ServeHTTP(&parked{header: http.Header{}, arrived: arrived, leave: leave}, r) })
		select {
		case token := <-arrived:
			require.Contains(t, token, `"text":"t"`)
		case <-time.After(20 * time.Second):
			require.Fail(t, "no token came")
		}
	}
	runtime.ReadMemStats(&after)
	assert.Less(t, (after.StackInuse-before.StackInuse)/streams, uint64(12<<10), "bytes of stack for each stream")
}

// likeServer calls f with as much of the stack in use as net/http's server and some middleware have.
//
//go:noinline
func likeServer(at int, f func()) byte {
	var frames [2000]byte
	frames[at]++
	f()
	return frames[at]
}

// parked is a client that takes nothing more once a token has come.
type parked struct {
	header  http.Header
	arrived chan<- string
	leave   <-chan struct{}
}

func (p *parked) Header() http.Header { return p.header }
func (p *parked) WriteHeader(int)     {}
func (p *parked) Write(b []byte) (int, error) {
	p.arrived <- string(b)
	<-p.leave
	return 0, io.ErrClosedPipe
}

// bareEngine gives each connection the same response, from one goroutine for all, and leaves it open.
func bareEngine(t *testing.T, response string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			if r, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
				_, _ = io.Copy(io.Discard, r.Body)
				_, _ = io.WriteString(c, response)
			}
		}
	}()
	return "http://" + l.Addr().String()
}
