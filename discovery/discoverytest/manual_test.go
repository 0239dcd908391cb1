// SPDX-License-Identifier: Apache-2.0

package discoverytest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
)

func TestEachWatcherOfAManualSourceGetsEveryList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		var got [2][]uint64
		done := make(chan error)
		watch := func(i int) {
			done <- m.Watch(t.Context(), func(snap discovery.Snapshot) { got[i] = append(got[i], snap.Version) })
		}
		go watch(0)
		synctest.Wait()
		assert.Empty(t, got[0], "it knows nothing yet")
		m.Publish(endpoint(t, "a:1"))
		m.Publish()
		synctest.Wait()
		go watch(1)
		synctest.Wait()
		m.Publish(endpoint(t, "b:1"))
		m.Publish()
		m.Fail(errors.New("down"))
		require.EqualError(t, <-done, "down")
		require.EqualError(t, <-done, "down")
		assert.Equal(t, [2][]uint64{{1, 2, 3, 4}, {2, 3, 4}}, got)
	})
}

func TestAManualSourceWorksAgainAfterAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := discoverytest.NewManual()
		m.Publish(endpoint(t, "a:1"))
		m.Fail(errors.New("down"))
		ctx, cancel := context.WithCancel(t.Context())
		var got []uint64
		done := make(chan error)
		go func() {
			done <- m.Watch(ctx, func(snap discovery.Snapshot) { got = append(got, snap.Version) })
		}()
		synctest.Wait()
		cancel()
		require.ErrorIs(t, <-done, context.Canceled)
		assert.Equal(t, []uint64{1}, got)
	})
}
