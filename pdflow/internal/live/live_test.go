// SPDX-License-Identifier: Apache-2.0

package live

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// member leaves its set some time after it was stopped.
type member struct {
	set   *Set[*member]
	after time.Duration // negative: never
	cause error
}

func (m *member) Stop(cause error) {
	if m.cause = cause; m.after >= 0 {
		time.AfterFunc(m.after, func() { m.set.Leave(m) })
	}
}

var errCut = errors.New("cut")

func TestDrainWaitsThenCutsThenGivesUp(t *testing.T) {
	for name, c := range map[string]struct {
		leaves, after, wait time.Duration // when the member leaves by itself, or after it was stopped; Drain's own time
		took                time.Duration
		cut                 bool
	}{
		"all leave in time":           {leaves: time.Second, wait: time.Minute, took: time.Second},
		"one is cut":                  {after: time.Second, wait: time.Minute, took: 61 * time.Second, cut: true},
		"one does not heed its cause": {after: -1, wait: time.Minute, took: time.Minute + cutting, cut: true},
		"nobody is waited for":        {after: 0, wait: 0, took: 0, cut: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var s Set[*member]
				m := &member{set: &s, after: c.after}
				require.True(t, s.Enter(m))
				if c.leaves > 0 {
					time.AfterFunc(c.leaves, func() { s.Leave(m) })
				}
				ctx, stop := context.WithTimeout(t.Context(), c.wait)
				defer stop()
				begin := time.Now()
				err := s.Drain(ctx, errCut)
				assert.Equal(t, c.took, time.Since(begin))
				assert.Equal(t, c.cut, err != nil)
				assert.Equal(t, c.cut, m.cause != nil)
			})
		})
	}
}

func TestASetThatIsEmptyIsDrainedWhateverTheContext(t *testing.T) {
	var s Set[*member]
	ctx, stop := context.WithCancel(t.Context())
	stop()
	require.NoError(t, s.Drain(ctx, errCut))
}

func TestWhoEntersAfterTheCutIsStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Set[*member]
		first := &member{set: &s}
		require.True(t, s.Enter(first))
		ctx, stop := context.WithCancel(t.Context())
		stop()
		require.ErrorIs(t, s.Drain(ctx, errCut), context.Canceled)
		late := &member{set: &s, after: -1}
		require.True(t, s.Enter(late))
		require.ErrorIs(t, late.cause, errCut)
		s.Leave(late)
		s.Close()
		require.False(t, s.Enter(late))
		require.True(t, s.Closed())
		require.Zero(t, s.Count())
	})
}

func TestStopEndsTheAttemptThatRunsAndAllThatFollow(t *testing.T) {
	var l Life
	l.Begin(t.Context())
	l.Cancel(errors.New("the attempt failed"))
	l.Renew()
	require.NoError(t, l.Context.Err(), "the next attempt has a context of its own")
	l.Stop(errCut)
	require.ErrorIs(t, context.Cause(l.Context), errCut)
	l.Renew()
	require.ErrorIs(t, context.Cause(l.Context), errCut)
}
