// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"log/slog"
	"slices"
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
	o.Prefill.Endpoint, o.Decode.Endpoint = s.Prefill.ID, s.Decode.ID
	if code != "" {
		o.Err, o.Usage = &pdflow.Error{Code: code}, pdflow.Usage{}
	}
	return o
}

// At a thousand requests a second the view keeps some of each second, and the totals count all. A flood of one error
// does not push out the other ones.
func TestTheLiveViewSamples(t *testing.T) {
	r := newRecent("m", slog.New(slog.DiscardHandler))
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

// Of 4,096 pairs the busy ones stay in the table, whenever they come, and what the others had is added up.
func TestThePairsOfALargeFleetAreBounded(t *testing.T) {
	r := newRecent("m", slog.New(slog.DiscardHandler))
	now := time.Unix(1000, 0)
	const each = 4096 * 3
	for i := range each {
		now := now.Add(2 * time.Duration(i) * pairEvery) // one leaves its place for this pair, and one for the busy one
		r.add(outcomeOf(i, ""), 0, now)
		if i%100 == 0 && i > each/2 { // a busy pair that comes late
			r.add(outcomeOf(7, pdflow.CodeTimeout), 0, now.Add(pairEvery))
			r.add(outcomeOf(7, ""), 0, now.Add(pairEvery))
		}
	}
	require.Len(t, r.pairs.m, pairsKept)
	counted, left := r.countedPairs()
	pairs, others := busiest(counted, left, map[pairKey]livePair{
		{"idle", "d"}: {Prefill: "idle", Decode: "d", State: "quarantine"}})
	require.Len(t, pairs, pairsShown)
	served, failed, busy, idle := others.Served, others.Failed, false, false
	for _, p := range pairs {
		served, failed = served+p.Served, failed+p.Failed
		busy = busy || p.Prefill == "10.0.0.7:8000" && p.Decode == "10.0.1.0:8000" && p.Failed > 50
		idle = idle || p.Prefill == "idle"
	}
	assert.True(t, busy, "the busy pair is not listed")
	assert.True(t, idle, "a pair in quarantine is listed, however little it has served")
	_, totals := r.list()
	assert.Equal(t, totals.Served, served, "the listed ones and the others are all requests")
	assert.Equal(t, totals.Errors["timeout"], failed)
}

// A pair that had no request for pairAway leaves its place to a new one, however busy it was; one that is little used
// but fresh stays.
func TestThePairsThatAreAwayLeaveFirst(t *testing.T) {
	const fresh = pairLooks - 1 // among pairLooks pairs there is one at least that is away
	keyOf := func(i int) pairKey {
		s := outcomeOf(i, "").Session
		return pairKey{s.Prefill.ID, s.Decode.ID}
	}
	for range 50 { // which pairs are looked at is chance
		var table pairTable
		begin := time.Unix(1000, 0)
		for i := range pairsKept - fresh {
			for range 10 {
				table.add(outcomeOf(i, ""), begin)
			}
		}
		for i := pairsKept - fresh; i < pairsKept; i++ {
			table.add(outcomeOf(i, ""), begin.Add(pairAway))
		}
		table.add(outcomeOf(pairsKept, ""), begin.Add(pairAway+time.Second))
		require.Len(t, table.m, pairsKept)
		for i := pairsKept - fresh; i <= pairsKept; i++ {
			require.NotNil(t, table.m[keyOf(i)], "a fresh pair has left, and one that is away has stayed")
		}
		require.Equal(t, otherPairs{Served: 10, Reused: 640}, table.others, "the one that left was busy")
	}
}

// In a large fleet each request has a pair that is not counted yet. It must not cost each of them a search.
func TestAPairLeavesItsPlaceNowAndThenOnly(t *testing.T) {
	var table pairTable
	now := time.Unix(1000, 0)
	requests := int64(0)
	for range 3 {
		for i := range 2 * pairsKept {
			table.add(outcomeOf(i, ""), now)
			requests++
		}
	}
	listed := func() (n int64) {
		all, others := table.counted()
		for _, p := range all {
			n += p.Served
		}
		return n + others.Served
	}
	require.Equal(t, requests, listed())
	first := 0
	for i := range pairsKept {
		s := outcomeOf(i, "").Session
		if table.m[pairKey{s.Prefill.ID, s.Decode.ID}] != nil {
			first++
		}
	}
	require.Equal(t, pairsKept-1, first, "one has left")
	table.add(outcomeOf(2*pairsKept, ""), now.Add(pairEvery))
	s := outcomeOf(2*pairsKept, "").Session
	require.NotNil(t, table.m[pairKey{s.Prefill.ID, s.Decode.ID}])
	require.Equal(t, requests+1, listed())
}

// Of more pairs than are listed one in quarantine stays before one in a cooldown, and that before a busy one.
func TestThePairsOfWhichSomethingIsSaidAreListed(t *testing.T) {
	var all []livePair
	states := map[pairKey]livePair{}
	for i := range pairsShown {
		name := fmt.Sprintf("busy%d", i)
		all = append(all, livePair{Prefill: name, Decode: "d", Served: 100})
		state := "cooldown"
		if i%2 == 1 {
			state = "quarantine"
		}
		quiet := fmt.Sprintf("quiet%d", i)
		states[pairKey{quiet, "d"}] = livePair{Prefill: quiet, Decode: "d", State: state}
	}
	listed := func() map[string]int {
		pairs, _ := busiest(slices.Clone(all), otherPairs{}, states)
		n := map[string]int{}
		for _, p := range pairs {
			n[p.State]++
		}
		return n
	}
	assert.Equal(t, map[string]int{"cooldown": pairsShown / 2, "quarantine": pairsShown / 2}, listed())
	delete(states, pairKey{"quiet0", "d"})
	assert.Equal(t, map[string]int{"": 1, "cooldown": pairsShown/2 - 1, "quarantine": pairsShown / 2}, listed())
	for i := range pairsShown { // the quarantine of half of all pairs leaves room for so many cooldowns
		name := fmt.Sprintf("more%d", i)
		states[pairKey{name, "d"}] = livePair{Prefill: name, Decode: "d", State: "cooldown"}
	}
	assert.Equal(t, map[string]int{"cooldown": pairsShown / 2, "quarantine": pairsShown / 2}, listed())
}

// A pair's times are means over its last requests, of what was measured.
func TestThePairsTimes(t *testing.T) {
	now := time.Unix(1000, 0)
	var table pairTable
	pair := func() livePair {
		counted, left := table.counted()
		list, others := busiest(counted, left, nil)
		require.Len(t, list, 1)
		require.Nil(t, others)
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

// BenchmarkRecent is what one request costs the view, with each pair of a fleet of 64 by 64 engines in turn.
func BenchmarkRecent(b *testing.B) {
	r := newRecent("m", slog.New(slog.DiscardHandler))
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
