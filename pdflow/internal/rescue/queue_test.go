// SPDX-License-Identifier: Apache-2.0

package rescue

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// taken is what a Take has returned.
type taken struct {
	place  *Place
	waited bool
	err    error
}

// wait calls Take beside the test.
func wait(ctx context.Context, q *Queue, until time.Time) <-chan taken {
	ch := make(chan taken, 1)
	go func() {
		p, waited, err := q.Take(ctx, "p", until)
		ch <- taken{p, waited, err}
	}()
	synctest.Wait()
	return ch
}

// full is a queue with all places of an engine taken.
func full(t *testing.T) (q *Queue, places []*Place) {
	t.Helper()
	q = &Queue{}
	for range atOnce {
		p, waited, err := q.Take(t.Context(), "p", time.Time{})
		require.NoError(t, err)
		require.False(t, waited)
		require.True(t, p.Held("p"))
		places = append(places, p)
	}
	return q, places
}

func TestThoseThatWaitGetPlacesInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, places := full(t)
		other, waited, _ := q.Take(t.Context(), "other", time.Time{})
		assert.True(t, other.Held("other") && !waited, "another engine has places of its own")
		first, second := wait(t.Context(), q, time.Time{}), wait(t.Context(), q, time.Time{})
		q.Give(places[0])
		q.Give(places[0]) // a place is given back once
		synctest.Wait()
		assert.Empty(t, second)
		got := <-first
		assert.True(t, got.place.Held("p") && got.waited)
		assert.False(t, places[0].Held("p"))
		q.Give(got.place)
		q.Give((<-second).place)
		q.Give(other)
		for _, p := range places[1:] {
			q.Give(p)
		}
		assert.Zero(t, q.Engines())
	})
}

// At the first failure, the second, the fourth … in a row, and not at the third.
func TestThoseThatWaitPickAgainWhenTheEngineHasFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, places := full(t)
		for n, again := range []bool{true, true, false, true} {
			waiting := wait(t.Context(), q, time.Time{})
			q.Failed(places[n])
			got := <-waiting
			require.NoError(t, got.err)
			assert.Equal(t, again, got.place == nil, "after failure %d", n+1)
			if places = append(places, got.place); again {
				p, _, err := q.Take(t.Context(), "p", time.Time{}) // the place that is free now
				require.NoError(t, err)
				places[len(places)-1] = p
			}
		}
	})
}

// A place that came to nothing, because its pick was declined, says nothing of the engine.
func TestOnlyALegThatServesEndsARowOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, places := full(t)
		fail := func(p *Place) (again bool) {
			waiting := wait(t.Context(), q, time.Time{})
			q.Failed(p)
			got := <-waiting
			if got.place == nil {
				got.place, _, _ = q.Take(t.Context(), "p", time.Time{}) // the place that is free now
				again = true
			}
			places = append(places, got.place)
			return again
		}
		assert.True(t, fail(places[0]), "the first failure")
		assert.True(t, fail(places[1]), "the second")
		q.Give(places[2])
		places[2], _, _ = q.Take(t.Context(), "p", time.Time{})
		assert.False(t, fail(places[2]), "the third, whatever a place says that was not used")
		q.Served(places[3])
		places[3], _, _ = q.Take(t.Context(), "p", time.Time{})
		assert.True(t, fail(places[3]), "the first again")
	})
}

func TestAWaitEndsWithItsTimeOrItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, places := full(t)
		late := wait(t.Context(), q, time.Now().Add(time.Second))
		ctx, leave := context.WithCancel(t.Context())
		gone := wait(ctx, q, time.Time{})
		leave()
		require.ErrorIs(t, (<-gone).err, context.Canceled)
		start := time.Now()
		require.ErrorIs(t, (<-late).err, ErrTooLong)
		assert.Equal(t, time.Second, time.Since(start))
		for _, p := range places {
			q.Give(p)
		}
		assert.Zero(t, q.Engines(), "nobody waits any more")
	})
}

// A place that comes at the moment in which the wait ends is another stream's.
func TestAPlaceThatComesTooLateIsGivenOn(t *testing.T) {
	q, places := full(t)
	turn := q.enter("p")
	q.Give(places[0])
	q.leave("p", turn)
	p, waited, err := q.Take(t.Context(), "p", time.Time{})
	require.NoError(t, err)
	assert.True(t, p.Held("p") && !waited)
}
