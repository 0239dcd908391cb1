// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// pacedClient is a client's connection: n bytes come every so often, until so many have come.
type pacedClient struct {
	*httptest.ResponseRecorder
	n, left  int
	every    time.Duration
	deadline time.Time
}

func (c *pacedClient) SetReadDeadline(t time.Time) error { c.deadline = t; return nil }

func (c *pacedClient) Read(p []byte) (int, error) {
	wait := c.every
	if c.left == 0 {
		wait = time.Hour
	}
	if until := time.Until(c.deadline); wait > until {
		time.Sleep(until)
		return 0, os.ErrDeadlineExceeded
	}
	time.Sleep(wait)
	n := min(c.n, c.left, len(p))
	c.left -= n
	return n, nil
}

func (*pacedClient) Close() error { return nil }

// A body has its 60 s as long as it comes at a pace that suits them. One that stands still, or trickles, is ended.
func TestABodyMustFillTheMemoryThatItHolds(t *testing.T) {
	const mib, never = 1 << 20, time.Hour
	for name, c := range map[string]struct {
		length, n, comes int // bytes: announced, of each piece that comes, in all
		every            time.Duration
		from, to         int   // seconds until it is over
		held             int64 // the most that it may have taken, in bytes
		whole            bool
	}{
		"nothing but a head":         {32 * mib, 0, 0, never, 10, 10, 16 << 10, false},
		"a small one's head":         {100, 0, 0, never, 10, 10, 100, false},
		"a byte each second":         {32 * mib, 1, mib, time.Second, 10, 11, 16 << 10, false},
		"a beginning, then nothing":  {32 * mib, mib, mib, time.Millisecond, 10, 25, 4 * mib, false},
		"half, then nothing":         {mib, mib / 2, mib / 2, time.Second, 30, 45, mib, false},
		"all but a byte":             {mib, mib / 2, mib - 1, time.Second, 60, 60, mib, false},
		"chunked, nothing":           {-1, 0, 0, never, 10, 10, 4 << 10, false},
		"chunked, a byte a second":   {-1, 1, mib, time.Second, 10, 11, 4 << 10, false},
		"a slow line":                {32 * mib, 64 << 10, 32 * mib, time.Second / 10, 51, 52, 32 * mib, true},
		"a pause for each piece":     {mib, mib / 2, mib, 9 * time.Second, 36, 36, mib, true},
		"slow from the first byte":   {100, 2, 100, time.Second, 50, 50, 100, true},
		"within the pace, not whole": {32 * mib, 48 << 10, 32 * mib, time.Second / 10, 59, 60, 32 * mib, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := &pacedClient{ResponseRecorder: httptest.NewRecorder(), n: c.n, left: c.comes, every: c.every}
				r := httptest.NewRequest(http.MethodPost, "/", io.NopCloser(client))
				r.Header.Set("Content-Type", "application/json")
				r.ContentLength = int64(c.length)
				taken, begun := int64(0), time.Now()
				body, fault := Read(client, r, 64*mib, time.Minute, false, func(n, _ int64) bool {
					taken += n
					return true
				})
				took := time.Since(begun).Seconds()
				assert.GreaterOrEqual(t, took, float64(c.from))
				assert.LessOrEqual(t, took, float64(c.to))
				assert.LessOrEqual(t, taken, c.held)
				if c.whole {
					assert.Nil(t, fault)
					assert.Len(t, body, c.length)
					assert.Zero(t, client.deadline, "the connection serves more requests")
				} else if assert.NotNil(t, fault) {
					assert.Equal(t, "body_timeout", fault.Code)
				}
			})
		})
	}
}
