// SPDX-License-Identifier: Apache-2.0

package querycache

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const url = "http://p:1"

// counting counts its calls and takes a second for each.
func counting(n *int) func() (int, error) {
	return func() (int, error) {
		*n++
		time.Sleep(time.Second)
		return *n, nil
	}
}

func get(t *testing.T, c *Cache[int], ask func() (int, error)) int {
	t.Helper()
	a, err := c.Get(t.Context(), url, ask)
	require.NoError(t, err)
	return a.Value
}

func TestAnEntryIsUsedForItsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, n := &Cache[int]{TTL: 30 * time.Second}, 0
		assert.Equal(t, 1, get(t, c, counting(&n)))
		time.Sleep(29*time.Second - time.Nanosecond)
		assert.Equal(t, 1, get(t, c, counting(&n)))
		time.Sleep(time.Nanosecond)
		assert.Equal(t, 2, get(t, c, counting(&n)), "its age counts from the start of the query")
		other, err := c.Get(t.Context(), "http://other:1", counting(&n))
		require.NoError(t, err)
		assert.Equal(t, 3, other.Value)
		assert.Equal(t, 2, get(t, c, counting(&n)))
	})
}

func TestCallersThatWaitShareOneQuery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, ttl := range []time.Duration{0, time.Minute} {
			c, n := &Cache[int]{TTL: ttl}, 0
			var all sync.WaitGroup
			for range 20 {
				all.Go(func() { assert.Equal(t, 1, get(t, c, counting(&n))) })
			}
			all.Wait()
			assert.Equal(t, 1, n)
		}
	})
}

func TestErrorsAreSharedAndNotCached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, n, broken := &Cache[int]{TTL: time.Minute}, 0, errors.New("broken")
		fail := func() (int, error) { n++; time.Sleep(time.Second); return 0, broken }
		var all sync.WaitGroup
		for range 5 {
			all.Go(func() {
				a, err := c.Get(t.Context(), url, fail)
				assert.ErrorIs(t, err, broken)
				assert.Nil(t, a)
			})
		}
		all.Wait()
		assert.Equal(t, 1, n)
		assert.Equal(t, 2, get(t, c, counting(&n)))
	})
}

func TestACallerThatLeavesEndsNobodyElsesWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, n := &Cache[int]{TTL: time.Minute}, 0
		ctx, leave := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() {
			_, err := c.Get(ctx, url, func() (int, error) { n++; <-ctx.Done(); return 0, ctx.Err() })
			assert.ErrorIs(t, err, context.Canceled)
		})
		synctest.Wait()
		all.Go(func() { assert.Equal(t, 2, get(t, c, counting(&n))) })
		waiting, leaveToo := context.WithCancel(t.Context())
		waits := make(chan error, 1)
		go func() {
			_, err := c.Get(waiting, url, counting(&n))
			waits <- err
		}()
		synctest.Wait()
		leaveToo()
		require.ErrorIs(t, <-waits, context.Canceled, "a caller that waits ends its own wait")
		leave()
		all.Wait()
		assert.Equal(t, 2, n)
		_, err := c.Get(ctx, url, counting(&n))
		require.ErrorIs(t, err, context.Canceled, "a caller that has left gets no cached entry either")
	})
}

func TestAPanicLeavesNobodyWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, n := &Cache[int]{TTL: time.Minute}, 0
		go func() {
			defer func() { _ = recover() }()
			_, _ = c.Get(t.Context(), url, func() (int, error) { time.Sleep(time.Second); panic("boom") })
		}()
		synctest.Wait()
		assert.Equal(t, 1, get(t, c, counting(&n)))
	})
}

func TestForgetRemovesOnlyTheGivenEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, n := &Cache[int]{TTL: time.Minute}, 0
		first, err := c.Get(t.Context(), url, counting(&n))
		require.NoError(t, err)
		c.Forget(url, first)
		assert.Equal(t, 2, get(t, c, counting(&n)))
		c.Forget(url, first)
		c.Forget("http://nobody:1", first)
		assert.Equal(t, 2, get(t, c, counting(&n)), "a newer entry stays")
	})
}

func TestOldEntriesAreRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Cache[int]{TTL: time.Second}
		for i := range 100 {
			_, err := c.Get(t.Context(), strconv.Itoa(i), func() (int, error) { return i, nil })
			require.NoError(t, err)
			_, err = c.Get(t.Context(), "bad"+strconv.Itoa(i), func() (int, error) { return 0, errors.New("bad") })
			require.Error(t, err)
		}
		assert.Len(t, c.slots, 100, "failures leave nothing at all")
		time.Sleep(2 * time.Minute)
		_, err := c.Get(t.Context(), url, func() (int, error) { return 0, nil })
		require.NoError(t, err)
		assert.Len(t, c.slots, 1)
	})
}

type judged bool

func (j judged) Error() string     { return "judged" }
func (j judged) EngineFault() bool { return bool(j) }

func TestDoubtful(t *testing.T) {
	assert.True(t, Doubtful(errors.New("unknown")))
	assert.True(t, Doubtful(fmt.Errorf("in: %w", judged(true))))
	assert.False(t, Doubtful(fmt.Errorf("in: %w", judged(false))))
}
