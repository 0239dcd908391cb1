// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// outcomeOf is an attempt of the i-th request at one pair of a fleet of 64 by 64 engines.
func outcomeOf(i int, code pdflow.Code) *pdflow.Outcome {
	s := &connector.Session{ID: strconv.Itoa(i), RequestID: strconv.Itoa(i),
		Prefill: discovery.Endpoint{ID: fmt.Sprintf("10.0.0.%d:8000", i%64)},
		Decode:  discovery.Endpoint{ID: fmt.Sprintf("10.0.1.%d:8000", i/64%64)}}
	o := &pdflow.Outcome{Session: s, Mode: pdflow.ModeDisaggregated, HandoffAge: 3 * time.Millisecond,
		Usage: pdflow.Usage{Input: 100, Output: 10, Reused: 64}}
	if code != "" {
		o.Err, o.Usage = &pdflow.Error{Code: code}, pdflow.Usage{}
	}
	return o
}

// At a thousand requests a second the view keeps some of each second, and the totals count all. A flood of one error
// does not push out the other ones.
func TestTheLiveViewSamples(t *testing.T) {
	r := newRecent("m")
	now := time.Unix(1000, 0)
	at := func(i int) time.Time { return now.Add(time.Duration(i) * time.Millisecond) }
	r.add(outcomeOf(0, pdflow.CodeStreamBroken), 0, at(0))
	for i := range 10_000 {
		code := pdflow.Code("")
		if i%2 == 1 {
			code = pdflow.CodeTimeout
		}
		r.add(outcomeOf(i, code), 0, at(i))
	}
	all, totals := r.list()
	assert.EqualValues(t, 5000, totals.Served)
	assert.Equal(t, map[string]int64{"timeout": 5000, "stream_broken": 1}, totals.Errors)
	assert.EqualValues(t, 5000*64, totals.Reused)
	kinds, seconds := map[string]int{}, map[int]int{}
	for _, x := range all {
		kinds[x.Error]++
		if i, err := strconv.Atoi(x.RequestID); err == nil && x.Error == "" {
			seconds[i/1000]++
		}
	}
	assert.Equal(t, map[string]int{"": recentServed, "timeout": recentFailed, "stream_broken": 1}, kinds)
	assert.Equal(t, map[int]int{5: recentPerSecond, 6: recentPerSecond, 7: recentPerSecond, 8: recentPerSecond,
		9: recentPerSecond}, seconds, "some of each of the last seconds")
}

// Of 4,096 pairs the busy ones stay in the table, whenever they come, and what the others had is in the rest.
func TestThePairsOfALargeFleetAreBounded(t *testing.T) {
	r := newRecent("m")
	now := time.Unix(1000, 0)
	const each = 4096 * 3
	for i := range each {
		r.add(outcomeOf(i, ""), 0, now)
		if i%100 == 0 && i > each/2 { // a busy pair that comes late
			r.add(outcomeOf(7, pdflow.CodeTimeout), 0, now)
			r.add(outcomeOf(7, ""), 0, now)
		}
	}
	require.Len(t, r.pairs.m, pairsKept)
	pairs, rest := r.pairs.list(map[pairKey]livePair{
		{"idle", "d"}: {Prefill: "idle", Decode: "d", State: "quarantine"}})
	require.Len(t, pairs, pairsShown)
	served, failed, busy, idle := rest.Served, rest.Failed, false, false
	for _, p := range pairs {
		served, failed = served+p.Served, failed+p.Failed
		busy = busy || p.Prefill == "10.0.0.7:8000" && p.Decode == "10.0.1.0:8000" && p.Failed > 50
		idle = idle || p.Prefill == "idle"
	}
	assert.True(t, busy, "the busy pair is not listed")
	assert.True(t, idle, "a pair in quarantine is listed, however little it has served")
	_, totals := r.list()
	assert.Equal(t, totals.Served, served, "the listed ones and the rest are all requests")
	assert.Equal(t, totals.Errors["timeout"], failed)
	// a pair whose engines are gone leaves its place to one that serves
	r.add(outcomeOf(4095, ""), 0, now.Add(pairAway+time.Second))
	r.add(outcomeOf(4094, ""), 0, now.Add(pairAway+time.Second))
	assert.Contains(t, r.pairs.m, pairKey{"10.0.0.62:8000", "10.0.1.63:8000"})
}

// A pair's times are means over its last requests, of what was measured.
func TestThePairsTimes(t *testing.T) {
	now := time.Unix(1000, 0)
	var table pairTable
	pair := func() livePair {
		list, rest := table.list(nil)
		require.Len(t, list, 1)
		require.Nil(t, rest)
		return list[0]
	}
	o := outcomeOf(1, "")
	o.HandoffAge = 0 // the connector hands nothing over
	table.add(o, now)
	assert.Nil(t, pair().Handoff)
	assert.Nil(t, pair().Transfer)
	request, err := connector.ParseRequest(connector.APICompletions, []byte(`{"model":"m","prompt":"a","stream":true}`))
	require.NoError(t, err)
	for i := range 200 {
		o := outcomeOf(1, "")
		o.Session.Request = request
		o.HandoffAge = 2 * time.Millisecond
		o.Prefill.End = now
		o.Decode.FirstByte = now.Add(40 * time.Millisecond)
		if i < 10 {
			o.Decode.FirstByte = now.Add(time.Second)
		}
		table.add(o, now)
	}
	assert.InDelta(t, 2, *pair().Handoff, .01)
	assert.InDelta(t, 40, *pair().Transfer, 5, "what is long past counts little")
	assert.EqualValues(t, 201*64, pair().Reused)
	alone := outcomeOf(1, "")
	alone.Session.Prefill = discovery.Endpoint{}
	table.add(alone, now)
	assert.EqualValues(t, 201, pair().Served, "one engine is no pair")
}

// refusing is a picker that has no room.
type refusing struct{}

func (refusing) Pick(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	time.Sleep(5 * time.Millisecond)
	return pdflow.Pick{}, &pdflow.Error{Code: pdflow.CodeOverloaded, Phase: "pick"}
}

// A request that admission refuses has a timeline, too: all of it is the queue.
func TestARefusedRequestHasATimeline(t *testing.T) {
	r := newRecent("m")
	_, err := recentPicker{refusing{}, r}.Pick(t.Context(), &pdflow.PickInput{RequestID: "x", Attempt: 1})
	require.ErrorIs(t, err, pdflow.CodeOverloaded)
	all, totals := r.list()
	require.Len(t, all, 1)
	assert.Equal(t, "x", all[0].RequestID)
	assert.Equal(t, "overloaded", all[0].Error)
	assert.GreaterOrEqual(t, all[0].End, 5.)
	assert.Equal(t, map[string]int64{"overloaded": 1}, totals.Errors)
}

// BenchmarkRecent is what one request costs the view, with each pair of a fleet of 64 by 64 engines in turn.
func BenchmarkRecent(b *testing.B) {
	r := newRecent("m")
	observer := r.observer()
	outcomes := make([]*pdflow.Outcome, 4096)
	for i := range outcomes {
		outcomes[i] = outcomeOf(i, "")
	}
	b.ReportAllocs()
	now := time.Unix(1000, 0)
	for i := 0; b.Loop(); i++ {
		o := outcomes[i%len(outcomes)]
		observer.SessionStart(b.Context(), o.Session)
		observer.LegStart(b.Context(), o.Session, pdflow.LegPrefill)
		observer.LegEnd(b.Context(), o.Session, &o.Prefill, nil)
		observer.LegStart(b.Context(), o.Session, pdflow.LegDecode)
		r.add(o, 0, now.Add(time.Duration(i)*time.Millisecond))
		observer.SessionEnd(b.Context(), o)
	}
}
