// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
)

// A settled session is known for one more minute, for the callbacks that D repeats. Then its id is forgotten.
func TestSettledSessionsAreForgotten(t *testing.T) {
	l, now := newWaiters(), time.Now()
	l.now = func() time.Time { return now }
	l.settle(l.expect([]string{"a", "a2"}), nil)
	l.expect([]string{"waits"})
	now = now.Add(remembered)
	l.settle(l.expect([]string{"b"}), nil)
	assert.NotNil(t, l.find("a"))
	now = now.Add(time.Second)
	l.settle(l.expect([]string{"c"}), nil)
	assert.Nil(t, l.find("a"))
	assert.Nil(t, l.find("a2"))
	assert.NotNil(t, l.find("b"))
	assert.NotNil(t, l.find("waits"), "however long it takes")
}

func TestSettledSessionsAreBounded(t *testing.T) {
	l := newWaiters()
	for i := range maxRemembers + 10 {
		l.settle(l.expect([]string{strconv.Itoa(i)}), nil)
	}
	assert.Len(t, l.byID, maxRemembers)
	assert.Nil(t, l.find("9"))
	assert.NotNil(t, l.find("10"))
}

// A session is known for a minute, and its callback may have megabytes. Neither a callback that was used nor one that
// came too late is kept for that minute.
func TestSettledSessionsKeepNoCallbacks(t *testing.T) {
	l, event := newWaiters(), connector.Event{Body: []byte("blocks")}
	used := l.expect([]string{"used"})
	used.ask(event, nil)
	got, err := used.wait(t.Context(), &server{})
	require.NoError(t, err)
	assert.Equal(t, "blocks", string(got.Body))
	assert.Nil(t, used.event.Body)

	failed := l.expect([]string{"failed"})
	failed.ask(event, nil)
	l.settle(failed, errClosed)
	assert.Nil(t, failed.event.Body)

	late := l.expect([]string{"late"})
	l.settle(late, errClosed)
	late.ask(event, nil)
	assert.Nil(t, late.event.Body)
}

// Anyone who reaches the port may send bodies: all that are read at once must not take more than a few hundred
// megabytes.
func TestLargeBodiesAreReadFewAtATime(t *testing.T) {
	s := &server{waiters: newWaiters()}
	front := httptest.NewServer(s)
	defer front.Close()
	var open []*io.PipeWriter
	done := make(chan int, maxLarge)
	for range maxLarge {
		r, w := io.Pipe()
		open = append(open, w)
		go func() {
			resp, err := http.Post(front.URL+callbackPath, "application/json", r)
			if err != nil {
				done <- 0
				return
			}
			_ = resp.Body.Close()
			done <- resp.StatusCode
		}()
		_, err := w.Write(make([]byte, smallEnough+1))
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return s.large.Load() == maxLarge }, 20*time.Second, time.Millisecond)
	post := func(size int) int {
		resp, err := http.Post(front.URL+callbackPath, "application/json",
			strings.NewReader(`{"request_id":"nobody","x":"`+strings.Repeat("x", size)+`"}`))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode
	}
	assert.Equal(t, http.StatusServiceUnavailable, post(2*smallEnough))
	assert.Equal(t, http.StatusNotFound, post(100), "the small ones of most prompts go on")
	for _, w := range open {
		require.NoError(t, w.Close())
	}
	for range maxLarge {
		assert.Equal(t, http.StatusBadRequest, <-done)
	}
	assert.Equal(t, http.StatusNotFound, post(2*smallEnough))
	assert.Zero(t, s.large.Load())
	http.DefaultClient.CloseIdleConnections()
}

// D's client accepts any status, so a flood of callbacks gets 503 and costs no more.
func TestTooManyCallbacksAreTurnedAway(t *testing.T) {
	s := &server{waiters: newWaiters()}
	s.active.Store(maxCallbacks)
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest(http.MethodPost, callbackPath, strings.NewReader(`{"request_id":"a"}`)))
	assert.Equal(t, http.StatusServiceUnavailable, w.Code)
	assert.EqualValues(t, maxCallbacks, s.active.Load())
	s.active.Store(maxCallbacks - 1)
	w = httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest(http.MethodPost, callbackPath, strings.NewReader(`{"request_id":"a"}`)))
	assert.Equal(t, http.StatusNotFound, w.Code)
}
