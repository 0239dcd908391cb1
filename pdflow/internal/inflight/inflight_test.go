// SPDX-License-Identifier: Apache-2.0

package inflight

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestOwnRequestsCountAsTheyWereWhenTheEngineSpoke(t *testing.T) {
	var e Engine
	t0 := time.Unix(1000, 0)
	after := func(d time.Duration) time.Time { return t0.Add(d) }
	for i := range 100 {
		e.Add(1, after(time.Duration(i)*100*time.Millisecond))
	}
	now := after(9900 * time.Millisecond)
	for _, c := range []struct {
		ago  time.Duration
		then int
	}{{0, 100}, {time.Second, 90}, {5 * time.Second, 50}, {9 * time.Second, 10}, {time.Hour, 1}} {
		then, sent := e.since(now.Add(-c.ago))
		assert.InDelta(t, c.then, then, 1, "%v ago", c.ago)
		assert.Equal(t, 100, then+sent)
	}
	then, _ := e.since(now.Add(time.Hour))
	assert.Equal(t, 100, then, "a clock that is ahead")
	e.Add(-100, now.Add(-time.Hour))
	then, sent := e.since(now)
	assert.Equal(t, [2]int{0, 0}, [2]int{then, sent}, "a clock that goes back loses no request")
}

func TestOthersAreWhatIsLeft(t *testing.T) {
	var f Fleet
	var e Engine
	t0 := time.Unix(1000, 0)
	e.Add(10, t0)
	others, known := f.Others(&e, 40, t0.Add(time.Second), t0.Add(time.Second))
	assert.True(t, known)
	assert.InDelta(t, 30, others, 0)
	e.Add(2, t0.Add(2*time.Second))
	others, _ = f.Others(&e, 40, t0.Add(time.Second), t0.Add(2*time.Second))
	assert.InDelta(t, 30+2*3*100./121, others, 1e-9, "nearly three others have sent as much since")
	e.Add(-12, t0.Add(3*time.Second))
	others, _ = f.Others(&e, 40, t0.Add(time.Second), t0.Add(3*time.Second))
	assert.InDelta(t, 0, others, 6, "and as much has ended")
}

func TestAnEngineThatCannotBeRightHasAsManyAsOthers(t *testing.T) {
	var f Fleet
	var well, liar, silent Engine
	now := time.Unix(1000, 0)
	well.Add(10, now)
	liar.Add(10, now)
	for range 100 {
		_, known := f.Others(&well, 40, now, now)
		assert.True(t, known)
	}
	others, known := f.Others(&liar, 0, now, now)
	assert.False(t, known)
	assert.InDelta(t, 30, others, 1e-9)
	others, known = f.Others(&silent, 0, time.Time{}, now)
	assert.False(t, known)
	assert.InDelta(t, 30, others, 1e-9)
	later := now.Add(time.Minute)
	others, _ = f.Others(&silent, 0, time.Time{}, later)
	assert.Zero(t, others, "nobody has said anything for long")
	var few Engine
	few.Add(4, later)
	_, known = f.Others(&few, 0, later, later)
	assert.True(t, known, "a few may have ended whose clients still read")
}
