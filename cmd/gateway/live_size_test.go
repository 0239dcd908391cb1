// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// podName is one of the longest names that a Deployment gives its pods, in a namespace: an endpoint's ID.
func podName(role string, i int) string {
	const most = 63
	end := fmt.Sprintf("-%s-7d9f8c6b5d-x%04d", role, i)
	return "inference/" + strings.Repeat("a", most-len(end)) + end
}

// live.json is largest when all rows are there and each has all its fields: 100 requests in flight and 180 that ended,
// whose ids have 128 characters, 100 pairs and 128 engines that are asked what they do. It stays below liveBound then.
func TestTheLiveViewIsBounded(t *testing.T) {
	g, m := fleetOf128(t)
	now := time.Date(2026, 11, 24, 17, 0, 0, 123456789, time.UTC)
	ms := func(v float64) *float64 { v += 123456.789; return &v }
	row := func(i int) timeline {
		silent := 0.
		if i < liveRunning {
			silent = *ms(6)
		}
		return timeline{RequestID: fmt.Sprintf("%0128d", i), Session: fmt.Sprintf("%032d", i),
			Model: "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", Connector: "ascend-layerwise",
			Mode: "disaggregated", Attempt: 2, Prefill: podName("prefill", i%64), Decode: podName("decode", i%64),
			Start: now.Add(time.Duration(i) * time.Second), Picked: ms(0), PrefillStart: ms(1), PrefillEnd: ms(2),
			DecodeStart: ms(3), FirstToken: ms(4), End: *ms(5), Input: 131072, Output: 32768, Reused: 131072,
			Resumed: 16384, Error: "transfer_missing", Leg: "prefill", Failing: "response", Status: 503,
			Retry: "not_accepted", Running: i < liveRunning, Phase: "prefill", Silent: silent}
	}
	var running, ended []timeline
	for i := range liveRunning + liveEnded + liveFailures + 100 {
		if x := row(i); x.Running {
			running = append(running, x)
		} else {
			ended = append(ended, x)
		}
	}
	states := map[pairKey]livePair{}
	for i := range 2 * pairsShown {
		p := livePair{Prefill: podName("prefill", i%64), Decode: podName("decode", i), Served: 123456789,
			Failed: 1234567, Reused: 12345678901, Handoff: ms(0), Transfer: ms(1), State: "quarantine", Left: *ms(2)}
		states[pairKey{p.Prefill, p.Decode}] = p
	}
	l := m.live(m.debug(modelReadiness{Model: row(0).Model, Name: "inference/" + strings.Repeat("m", 63), Ready: true}),
		g.tel.engines, now)
	l.Connector, l.Rollout = row(0).Connector, row(0).Connector
	l.Pairs, l.OtherPairs = busiest(nil, otherPairs{Served: 1}, states)
	l.Phases = m.doing()
	l.Totals = liveTotals{Served: 123456789, Output: 12345678901, Reused: 12345678901, Errors: map[string]int64{}}
	for i := range 30 { // more codes than there are
		l.Totals.Errors[fmt.Sprintf("transfer_missing_%d", i)] = 1234567
	}
	l.Admission = &liveAdmission{Queued: 1000, Prefill: occupancy{1000, 1000}, Decode: occupancy{1000, 1000},
		Refused: map[string]int64{"queue_full": 1234567, "queue_timeout": 1234567}}
	count := modelCount{123456789, 123456789, 123456789, 123456789, 123456789, 123456789, 123456789, 12345678901,
		12345678901, 12345678901, 1234567890123456, histogram{}}
	l.Minute = liveSpan{count, 123.456, &percentiles{*ms(0), *ms(1)}}
	l.Hour = l.Minute
	marks := make([]liveMark, 0, faultKinds)
	for _, rule := range markRules {
		marks = append(marks, liveMark{rule.word, now.Truncate(time.Second), 1234567, 1234567})
	}
	var percents []int
	for range hourMinutes {
		p := &l.Past
		p.Served, p.Failed = append(p.Served, 1234567), append(p.Failed, 1234567)
		p.First, p.Output = append(p.First, *ms(0)), append(p.Output, 123456789)
		p.Taken, p.Bytes = append(p.Taken, 123456789), append(p.Bytes, 12345678901234)
		percents = append(percents, 100)
	}
	l.KV = &liveKV{Taken: 12345678901, Bytes: 1234567890123456}
	require.Len(t, l.Endpoints, 128)
	for i := range l.Endpoints {
		l.Endpoints[i] = liveEndpoint{debugEndpoint: debugEndpoint{ID: podName("prefill", i),
			URL: "http://10.123.123.123:8000", Role: "prefill", Phase: "terminating", Group: "inference/group-a",
			Zone: "europe-west4-a", Healthy: true, LastFault: strings.Repeat("f", 64), Load: 1000, IllSince: &now,
			KVEvents: "incomplete"},
			Recent: &liveRecent{1234567, 1234567, &percentiles{*ms(0), *ms(1)}, marks, *ms(0), percents},
			Engine: &engineLoad{Running: 1000, Waiting: 1000, KVUsage: 0.8765432109876543, Taken: 12345678901,
				Bytes: 1234567890123456},
			Prefill: &occupancy{1000, 1000}, Decode: &occupancy{1000, 1000}, State: "quarantine", Left: *ms(0)}
	}
	picture := livePicture{Time: now, Draining: true, Models: []liveModel{l},
		Requests: listRequests(running, ended)}

	require.Len(t, picture.Requests, liveRunning+liveEnded+liveFailures)
	require.Len(t, l.Pairs, pairsShown)
	filled(t, reflect.ValueOf(picture.Requests[0]), "a request")
	filled(t, reflect.ValueOf(l.Pairs[0]), "a pair")
	filled(t, reflect.ValueOf(l.Endpoints[0]), "an engine")
	filled(t, reflect.ValueOf(l.Past), "the last hour")
	size := func(v any) int {
		body, err := json.Marshal(v)
		require.NoError(t, err)
		return len(body)
	}
	t.Logf("live.json has %d bytes: %d of requests, %d of engines, %d of pairs", size(picture), size(picture.Requests),
		size(l.Endpoints), size(l.Pairs))
	assert.Less(t, size(picture), liveBound)
}

// filled tells of fields that have nothing: a new one makes live.json larger.
func filled(t *testing.T, v reflect.Value, what string) {
	t.Helper()
	for i := range v.NumField() {
		field, name := v.Field(i), v.Type().Field(i).Name
		for field.Kind() == reflect.Pointer {
			require.False(t, field.IsNil(), "%s: %s", what, name)
			field = field.Elem()
		}
		assert.False(t, field.IsZero(), "%s: %s", what, name)
		if field.Kind() == reflect.Struct && field.Type() != reflect.TypeFor[time.Time]() {
			filled(t, field, what+"."+name)
		}
	}
}
