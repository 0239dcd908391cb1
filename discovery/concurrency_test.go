// SPDX-License-Identifier: Apache-2.0

package discovery_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
)

// counting is a source whose n-th snapshot says n in every endpoint, published as fast as it goes until n is last.
func counting(t testing.TB, prefix string, endpoints, last int) discovery.Source {
	return discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
		for n := 1; n <= last; n++ {
			list := make([]discovery.Endpoint, endpoints)
			for i := range list {
				list[i] = endpoint(t, fmt.Sprint(prefix, i), zone(strconv.Itoa(n)))
			}
			publish(discovery.Snapshot{Version: uint64(n), Endpoints: list})
		}
		<-ctx.Done()
		return nil
	})
}

// Every reader of "take the channel, load, wait" ends on the last state, however the writers and it interleave, and
// sees each source whole and never going back.
func TestNoUpdateIsLostAndNoSnapshotIsHalf(t *testing.T) {
	const sources, size, last = 8, 5, 200
	var list []discovery.Source
	for i := range sources {
		list = append(list, counting(t, fmt.Sprint("s", i, "-"), size, last))
	}
	set := discovery.NewSet(list...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	read := func() {
		var version uint64
		at := map[int]int{} // source to its last state
		for {
			changed := set.Changed()
			snap := set.Load()
			if !assert.GreaterOrEqual(t, snap.Version, version, "versions rise") {
				return
			}
			version = snap.Version
			if !assert.Zero(t, len(snap.Endpoints)%size, "a source is in the set whole") {
				return
			}
			finished := 0
			for i := 0; i < len(snap.Endpoints); i += size {
				var source, k int
				_, err := fmt.Sscanf(snap.Endpoints[i].ID, "s%d-%d", &source, &k)
				assert.NoError(t, err)
				state, err := strconv.Atoi(snap.Endpoints[i].Zone)
				assert.NoError(t, err)
				for _, e := range snap.Endpoints[i : i+size] {
					if !assert.Equal(t, snap.Endpoints[i].Zone, e.Zone, "half a snapshot") {
						return
					}
				}
				if !assert.GreaterOrEqual(t, state, at[source], "a source never goes back") {
					return
				}
				at[source] = state
				if state == last {
					finished++
				}
			}
			if finished == sources {
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				assert.Fail(t, "an update was lost", "version %d", version)
				return
			}
		}
	}
	var readers, verdicts sync.WaitGroup
	for range 8 {
		readers.Go(read)
	}
	stop := make(chan struct{})
	verdicts.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				set.SetHealthy("s3-1", i%2 == 0)
			}
		}
	})
	runCtx, end := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- set.Run(runCtx) }()
	readers.Wait()
	close(stop)
	verdicts.Wait()
	end()
	require.NoError(t, <-done)
}

// A channel taken before a version is closed by it, the channel of the newest version is open.
func TestChangedBelongsToItsVersion(t *testing.T) {
	step := make(chan []discovery.Endpoint)
	set, _ := run(t, discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case list := <-step:
				publish(discovery.Snapshot{Endpoints: list})
				step <- nil
			}
		}
	}))
	for i := range 50 {
		before := set.Changed()
		select {
		case <-before:
			require.Fail(t, "closed before its successor")
		default:
		}
		step <- []discovery.Endpoint{endpoint(t, fmt.Sprint("e", i))}
		<-step
		select {
		case <-before:
		default:
			require.Fail(t, "open although there is a successor")
		}
	}
}

// Who sees the channel closed finds the successor, even if nothing lies between the two: it is there before anybody is
// told.
func TestAClosedChannelMeansThatTheSuccessorIsThere(t *testing.T) {
	set, _ := run(t, counting(t, "e", 1, 1))
	require.NoError(t, set.WaitReady(t.Context(), func(s *discovery.Snapshot) bool { return len(s.Endpoints) == 1 }))
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				before := set.Load()
				changed := set.Changed()
				if set.Load() != before {
					continue // whose channel it is, is not known
				}
				for waiting := true; waiting; {
					select {
					case <-stop:
						return
					case <-changed:
						waiting = false
					default: // without sleeping, to be there first
					}
				}
				if !assert.NotSame(t, before, set.Load()) {
					return
				}
			}
		})
	}
	for i := range 100_000 {
		set.SetHealthy("e0", i%2 == 1)
	}
	close(stop)
	readers.Wait()
}
