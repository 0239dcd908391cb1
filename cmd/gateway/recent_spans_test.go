// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// legsOf is an attempt at a stream of prefill engine p and decode engine d, which began at a time. Prefill takes 20 ms,
// and the first token comes after 10 more and what is late.
func legsOf(t testing.TB, p, d string, begin time.Time, late time.Duration) *pdflow.Outcome {
	t.Helper()
	request, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"a","stream":true}`))
	require.NoError(t, err)
	o := &pdflow.Outcome{Mode: pdflow.ModeDisaggregated, Session: &connector.Session{Request: request,
		Prefill: discovery.Endpoint{ID: p, Role: discovery.RolePrefill},
		Decode:  discovery.Endpoint{ID: d, Role: discovery.RoleDecode}}}
	done := begin.Add(20 * time.Millisecond)
	o.Prefill = pdflow.LegOutcome{Leg: pdflow.LegPrefill, Endpoint: p, Start: begin, End: done}
	o.Decode = pdflow.LegOutcome{Leg: pdflow.LegDecode, Endpoint: d, Start: done, End: done.Add(time.Second),
		FirstByte: done.Add(10*time.Millisecond + late)}
	return o
}

// prefillFails and its like make an attempt a failed one, as the flow tells it.
func prefillFails(o *pdflow.Outcome, status int) {
	o.Err = &pdflow.Error{Code: pdflow.CodePrefillFailed, Leg: pdflow.LegPrefill, Phase: "response",
		Endpoint: o.Prefill.Endpoint, Status: status}
	o.Prefill.Err, o.Decode = o.Err, pdflow.LegOutcome{Leg: pdflow.LegDecode}
}

func decodeFails(o *pdflow.Outcome, code pdflow.Code, phase string) {
	o.Err = &pdflow.Error{Code: code, Leg: pdflow.LegDecode, Phase: phase, Endpoint: o.Decode.Endpoint}
	o.Decode.Err = o.Err
	if code == pdflow.CodeDecodeFailed {
		o.Err.Status, o.Decode.FirstByte = 500, time.Time{}
	}
}

// Each case is a minute with ten requests a second for each pair of two prefill and three decode engines. What is wrong
// begins after 20 s.
func TestTheMarksOfEngines(t *testing.T) {
	t.Parallel()
	fleet := []string{"P0", "P1"}
	decoders := []string{"D0", "D1", "D2"}
	for name, c := range map[string]struct {
		prefill, decode []string
		wrong           func(o *pdflow.Outcome, p, d string, i int)
		want            map[string]string
	}{
		"nothing": {fleet, decoders, func(*pdflow.Outcome, string, string, int) {}, map[string]string{}},
		"one request in ten of P1, a cut stream in twenty of D0, four in ten of D1 late": {fleet, decoders,
			func(o *pdflow.Outcome, p, d string, i int) {
				switch {
				case p == "P1" && i%10 == 0:
					prefillFails(o, 500)
				case d == "D0" && i%20 == 1:
					decodeFails(o, pdflow.CodeStreamBroken, "stream")
				case d == "D1" && i%10 < 4:
					o.Decode.FirstByte = o.Decode.FirstByte.Add(900 * time.Millisecond)
				}
			}, map[string]string{"P1": "failing", "D0": "cut streams", "D1": "slow"}},
		"a slow prefill engine": {fleet, decoders, func(o *pdflow.Outcome, p, _ string, i int) {
			if p == "P0" && i%4 == 0 {
				late := 500 * time.Millisecond
				o.Prefill.End, o.Decode.Start = o.Prefill.End.Add(late), o.Decode.Start.Add(late)
				o.Decode.FirstByte = o.Decode.FirstByte.Add(late)
			}
		}, map[string]string{"P0": "slow"}},
		"two of three are slow": {fleet, decoders, func(o *pdflow.Outcome, _, d string, i int) {
			if d != "D2" && i%3 == 0 {
				o.Decode.FirstByte = o.Decode.FirstByte.Add(2 * time.Second)
			}
		}, map[string]string{"D0": "slow", "D1": "slow"}},
		"all slower, as under load": {fleet, decoders, func(o *pdflow.Outcome, _, _ string, _ int) {
			o.Decode.FirstByte = o.Decode.FirstByte.Add(2 * time.Second)
		}, map[string]string{}},
		"a decode engine that has no room": {fleet, decoders, func(o *pdflow.Outcome, _, d string, i int) {
			if d == "D2" && i%5 == 0 {
				decodeFails(o, pdflow.CodeDecodeFailed, "response")
				o.Err.Status = 503
			}
		}, map[string]string{"D2": "overloaded"}},
		// decode answers 500: its own fault, or that of what prefill gave it
		"decode fails with each prefill engine": {fleet, decoders, func(o *pdflow.Outcome, _, d string, i int) {
			if d == "D1" && i%10 == 0 {
				decodeFails(o, pdflow.CodeDecodeFailed, "response")
			}
		}, map[string]string{"D1": "failing"}},
		"each decode engine fails with one prefill engine": {fleet, decoders,
			func(o *pdflow.Outcome, p, _ string, i int) {
				if p == "P0" && i%10 == 0 {
					decodeFails(o, pdflow.CodeTimeout, "send")
				}
			}, map[string]string{"P0": "failing"}},
		"the same, and there is no other": {[]string{"P0"}, decoders, func(o *pdflow.Outcome, _, _ string, i int) {
			if i%10 == 0 {
				decodeFails(o, pdflow.CodeDecodeFailed, "response")
			}
		}, map[string]string{"P0": "failing"}},
		"one pair fails": {fleet, decoders, func(o *pdflow.Outcome, p, d string, i int) {
			if p == "P1" && d == "D0" && i%2 == 0 {
				decodeFails(o, pdflow.CodeDecodeFailed, "response")
			}
		}, map[string]string{"P1": "failing", "D0": "failing"}},
		"what the client's request draws": {fleet, decoders, func(o *pdflow.Outcome, _, _ string, i int) {
			switch i % 4 {
			case 0:
				decodeFails(o, pdflow.CodeDecodeRejected, "response")
				o.Err.Status = 400
			case 1:
				decodeFails(o, pdflow.CodeClientGone, "stream")
			}
		}, map[string]string{}},
		"two of a minute": {fleet, decoders, func(o *pdflow.Outcome, p, d string, i int) {
			if p == "P0" && d == "D0" && i > 590 && i < 593 {
				prefillFails(o, 500)
			}
		}, map[string]string{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, begin := newRecent("m", slog.New(slog.DiscardHandler)), time.Unix(6000, 0)
			for i := range 600 {
				at := begin.Add(time.Duration(i) * 100 * time.Millisecond)
				for _, p := range c.prefill {
					for _, d := range c.decode {
						o := legsOf(t, p, d, at.Add(-time.Second), 0)
						if i >= 200 {
							c.wrong(o, p, d, i)
						}
						r.add(o, 0, at)
					}
				}
			}
			_, _, _, engines := r.spans(begin.Add(time.Minute))
			got := map[string]string{}
			for id, e := range engines {
				for _, m := range e.Marks {
					got[id] += m.Word
					assert.WithinRange(t, m.Since, begin.Add(20*time.Second), begin.Add(35*time.Second), id)
				}
			}
			assert.Equal(t, c.want, got)
			_, _, _, engines = r.spans(begin.Add(3 * time.Minute))
			for id, e := range engines {
				assert.Empty(t, e.Marks, "%s: nothing was wrong for a minute", id)
				assert.Zero(t, e.Attempts)
			}
		})
	}
}

// A single request of a quiet minute that fails is a mark: it is all that is known of the engine.
func TestTheMarkOfAQuietEngine(t *testing.T) {
	t.Parallel()
	r, begin := newRecent("m", slog.New(slog.DiscardHandler)), time.Unix(6000, 0)
	o := legsOf(t, "P0", "D0", begin, 0)
	prefillFails(o, 500)
	r.add(o, 0, begin)
	_, _, _, engines := r.spans(begin.Add(slotLength))
	assert.Equal(t, &liveRecent{Attempts: 1, Failed: 1, Past: []int{100},
		Marks: []liveMark{{"failing", begin.Add(slotLength).UTC(), 1, 1}}}, engines["P0"])
	assert.Nil(t, engines["D0"], "it got nothing")
}

// The last minute and the last hour forget what is older, and requests are told apart from attempts.
func TestTheSpansOfAModel(t *testing.T) {
	t.Parallel()
	r, begin := newRecent("m", slog.New(slog.DiscardHandler)), time.Unix(6000, 0)
	at := func(d time.Duration) time.Time { return begin.Add(d) }
	failing := legsOf(t, "P0", "D0", begin, 0)
	prefillFails(failing, 500)
	for i := range 10 {
		r.add(failing, 0, at(time.Second))
		if i < 8 { // two fail twice
			r.add(legsOf(t, "P1", "D0", begin, 0), 0, at(2*time.Second))
			r.requestEnded("", 30*time.Millisecond, 1, at(2*time.Second))
		} else {
			r.add(failing, 0, at(2*time.Second))
			r.requestEnded(pdflow.CodePrefillFailed, 0, 2, at(2*time.Second))
		}
	}
	r.requestEnded(pdflow.CodeOverloaded, 0, 0, at(3*time.Second))
	r.requestEnded(pdflow.CodeClientGone, 0, 0, at(3*time.Second))
	r.readKV(liveKV{Taken: 1000, Bytes: 1}, nil, at(3*time.Second)) // what was counted before is not of this hour
	r.readKV(liveKV{Taken: 1500, Bytes: 4}, nil, at(8*time.Second))
	minute, hour, past, engines := r.spans(at(10 * time.Second))
	want := modelCount{Served: 8, Failed: 3, Refused: 1, Left: 1, Attempts: 20, Broken: 12, Mended: 8, Taken: 500,
		Bytes: 3}
	counted := func(s liveSpan) modelCount { s.first = histogram{}; return s.modelCount }
	assert.Equal(t, want, counted(minute))
	assert.Equal(t, want, counted(hour))
	assert.InDelta(t, 9, minute.Seconds, .01, "since the first request")
	assert.InDelta(t, 30, minute.First.P50, 4)
	assert.Equal(t, []int64{3}, past.Failed)
	assert.EqualValues(t, 12, engines["P0"].Failed)
	assert.Nil(t, engines["P0"].First, "it has served nothing")
	assert.InDelta(t, 20, engines["P1"].First.P99, 3)
	assert.InDelta(t, 10, engines["D0"].First.P50, 1.5)

	minute, hour, past, engines = r.spans(at(30 * time.Minute))
	assert.Equal(t, modelCount{}, counted(minute))
	assert.Equal(t, want, counted(hour))
	assert.InDelta(t, 55, minute.Seconds, 5)
	assert.InDelta(t, 30*60, hour.Seconds, 2)
	assert.Len(t, past.Served, 31)
	assert.Equal(t, []int64{8, 0, 0}, past.Served[:3])
	assert.Equal(t, 100, engines["P0"].Past[0])
	assert.Equal(t, -1, engines["P0"].Past[1])

	_, hour, past, engines = r.spans(at(61 * time.Minute))
	assert.Equal(t, modelCount{}, counted(hour))
	assert.Equal(t, make([]int64, hourMinutes), past.Served)
	assert.Len(t, engines["P0"].Past, hourMinutes)
	_, hour, _, _ = r.spans(at(100 * time.Hour)) // nobody has looked, and nothing was asked
	assert.Equal(t, modelCount{}, counted(hour))
	assert.InDelta(t, 3570, hour.Seconds, 30)
}

// A percentile is right to an eighth, from 64 µs on.
func TestTheHistogramOfTimes(t *testing.T) {
	t.Parallel()
	for _, d := range []time.Duration{100 * time.Microsecond, time.Millisecond, 7 * time.Millisecond, time.Second,
		42 * time.Second, 10 * time.Minute} {
		var h histogram
		h.observe(d)
		end, begin := bucketEnd(bucketOf(d)), bucketEnd(bucketOf(d)-1)
		assert.LessOrEqual(t, begin, milliseconds(d))
		assert.Greater(t, end, milliseconds(d))
		assert.InEpsilon(t, milliseconds(d), h.percentiles().P50, .13)
		assert.EqualValues(t, 1, h.over(begin))
		assert.Zero(t, h.over(end))
	}
	var h histogram
	for i := range 1000 {
		h.observe(time.Duration(i+1) * time.Millisecond)
	}
	assert.InEpsilon(t, 500, h.percentiles().P50, .03)
	assert.InEpsilon(t, 990, h.percentiles().P99, .06)
	for _, d := range []time.Duration{-time.Second, 0, 1000 * time.Hour} {
		h.observe(d)
	}
	assert.EqualValues(t, 3, h[0]+h[len(h)-1])
	assert.Nil(t, new(histogram).percentiles())
}

// A lease that ends before decode has read the KV is the mark of the prefill engine. It is none where the attempt had
// failed before that, where the engine has begun to count anew, and for what it counted before the gateway asked.
func TestTheMarkOfLeases(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fails bool
		first float64 // leases that have ended when the engine is first asked, and then
		then  float64
		want  []liveMark
	}{
		"all are well":             {false, 7, 7, nil},
		"decode is late":           {false, 7, 11, []liveMark{{Word: "lease over", Count: 4, Of: 20}}},
		"one":                      {false, 7, 8, nil},
		"decode fails":             {true, 7, 27, nil},
		"decode fails and is late": {true, 7, 32, []liveMark{{Word: "lease over", Count: 5, Of: 20}}},
		"it was started again":     {false, 70, 20, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log strings.Builder
			r, begin := newRecent("m", slog.New(slog.NewTextHandler(&log, nil))), time.Unix(6000, 0)
			r.readKV(liveKV{}, map[string]float64{"P": c.first}, begin)
			for range 20 {
				o := legsOf(t, "P", "D", begin, 0)
				if c.fails {
					decodeFails(o, pdflow.CodeDecodeFailed, "connect")
				}
				r.add(o, 0, begin)
			}
			r.readKV(liveKV{}, map[string]float64{"P": c.then}, begin.Add(time.Second))
			_, _, _, engines := r.spans(begin.Add(10 * time.Second))
			var got []liveMark
			for _, m := range engines["P"].Marks {
				if m.Since = (time.Time{}); m.Word == "lease over" {
					got = append(got, m)
				}
			}
			assert.Equal(t, c.want, got)
			assert.Equal(t, c.want != nil, strings.Contains(log.String(), "kv_lease_duration"))
		})
	}
}

// Engines come and go: the one that was used longest ago leaves its place.
func TestTheEnginesOfTheLastHourAreBounded(t *testing.T) {
	t.Parallel()
	r, begin := newRecent("m", slog.New(slog.DiscardHandler)), time.Unix(6000, 0)
	for i := range 2 * enginesKept {
		r.add(legsOf(t, "P", fmt.Sprint("D", i), begin, 0), 0, begin.Add(time.Duration(i)*time.Second))
	}
	_, _, _, engines := r.spans(begin.Add(2 * enginesKept * time.Second))
	assert.Len(t, engines, enginesKept)
	assert.Contains(t, engines, "P")
	assert.Contains(t, engines, fmt.Sprint("D", 2*enginesKept-1))
	assert.NotContains(t, engines, "D0")
}

// The middle of the others does not have the engine itself in it.
func TestTheOthersOfARole(t *testing.T) {
	t.Parallel()
	for _, values := range [][]float64{{3}, {3, 4}, {2, 3, 4}, {1, 2, 3, 4}, {3, 3, 3}, {1, 1, 9, 9, 9}} {
		s := standing{discovery.RoleDecode: values}
		for i, mine := range values {
			others := slices.Delete(slices.Clone(values), i, i+1)
			want := -1.
			if len(others) > 0 {
				want = others[(len(others)-1)/2]
			}
			assert.InDelta(t, want, s.others(discovery.RoleDecode, mine), 0, "%v of %v", mine, values)
		}
		assert.InDelta(t, -1, s.others(discovery.RolePrefill, 1), 0)
	}
}
