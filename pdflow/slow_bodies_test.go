// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
)

// slowBodies opens connections that send the head of a request and the first bytes of its body, and nothing more. It
// returns when the handler reads all of them.
func slowBodies(t *testing.T, h http.Handler, n, length int, first string) (url string) {
	t.Helper()
	var came atomic.Int64
	url = serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		came.Add(1)
		h.ServeHTTP(w, r)
	}))
	for range n {
		c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		_, err = fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"+
			"Content-Length: %d\r\n\r\n%s", length, first)
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return came.Load() == int64(n) }, 20*time.Second, time.Millisecond)
	return url
}

// Each of 520 heads that announced 32 MiB had 512 KiB before a byte had come: 52 KB on the wire used up 256 MiB, and
// all other clients got 503 for a minute.
func TestHeadsOfLargeBodiesStopNobody(t *testing.T) {
	budget := &pdflow.Budget{Bytes: 256 << 20}
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithBudget(budget))
	url := slowBodies(t, x.flow, 520, 32<<20, "")
	time.Sleep(100 * time.Millisecond) // the last has taken what it gets
	t.Logf("%d bytes taken", budget.InUse())
	for _, size := range []int{100, 60_000, 1 << 20, 20 << 20} {
		r := post(t, url, "/v1/completions", ofSize(size))
		assert.Equal(t, http.StatusOK, r.status, "a body of %d bytes: %s", size, r.body)
	}
	assert.LessOrEqual(t, budget.InUse(), int64(520*16<<10))
}

// However many large bodies come in, small ones are served.
func TestLargeBodiesLeaveAShareToSmallOnes(t *testing.T) {
	budget := &pdflow.Budget{Bytes: 16 << 20}
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithBudget(budget),
		pdflow.WithTimeouts(config.Timeouts{Body: time.Minute}))
	url := slowBodies(t, x.flow, 40, 8<<20, strings.Repeat(" ", 200<<10)) // each may have 1 MiB
	require.Eventually(t, func() bool { return budget.Refused() > 10 }, 20*time.Second, time.Millisecond)
	r := post(t, url, "/v1/completions", ofSize(60_000))
	assert.Equal(t, http.StatusOK, r.status, r.body)
	r = post(t, url, "/v1/completions", ofSize(4<<20))
	assert.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
}

// A body that makes no progress is ended long before the time is over in which a whole one must have come.
func TestABodyThatStandsStillIsEnded(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithTimeouts(config.Timeouts{Body: 6 * time.Second}))
	url := serve(t, x.flow)
	for _, framing := range []string{"Content-Length: 33554432\r\n\r\n{",
		"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"} {
		c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		require.NoError(t, err)
		begun := time.Now()
		_, err = io.WriteString(c, "POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"+
			framing)
		require.NoError(t, err)
		require.NoError(t, c.SetReadDeadline(begun.Add(4*time.Second)))
		b := make([]byte, 12)
		_, err = io.ReadFull(c, b)
		require.NoError(t, err, "%s", framing)
		assert.Equal(t, "HTTP/1.1 408", string(b))
		_ = c.Close()
	}
}
