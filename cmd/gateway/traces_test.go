// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// writtenSpan is one of a file that -trace writes.
type writtenSpan struct {
	Name       string
	StartTime  time.Time
	Attributes []attributeOf
	Events     []struct {
		Name       string
		Attributes []attributeOf
	}
}

type attributeOf struct {
	Key   string
	Value struct{ Value any }
}

func of(attributes []attributeOf, key string) string {
	for _, a := range attributes {
		if a.Key == key {
			return fmt.Sprint(a.Value.Value)
		}
	}
	return ""
}

// story is what an operator reads of a trace: the legs in the order in which they began, then what the request's span
// tells of retries.
func story(t *testing.T, file string) []string {
	t.Helper()
	var all []writtenSpan
	eventually(t, func() bool {
		all = nil
		text, err := os.ReadFile(file)
		for line := range bytes.Lines(text) {
			var s writtenSpan
			if json.Unmarshal(line, &s) == nil {
				all = append(all, s)
			}
		}
		return err == nil && slices.ContainsFunc(all, func(s writtenSpan) bool { return s.Name == "pd.request" })
	})
	slices.SortFunc(all, func(a, b writtenSpan) int { return a.StartTime.Compare(b.StartTime) })
	var legs, events []string
	for _, s := range all {
		a := s.Attributes
		if s.Name != "pd.request" {
			legs = append(legs, fmt.Sprintf("%s %s %s: %s", of(a, "pd.attempt"), s.Name, of(a, "pd.endpoint"),
				strings.TrimSpace(of(a, "http.response.status_code")+" "+of(a, "error.type"))))
		}
		for _, e := range s.Events {
			a := e.Attributes
			if reason := of(a, "pd.reason"); reason != "" {
				events = append(events, fmt.Sprintf("%s: %s at %s, status %s, since %s", e.Name, of(a, "error.type"),
					of(a, "pd.endpoint"), cmp.Or(of(a, "http.response.status_code"), "none"), reason))
			}
		}
	}
	return append(legs, events...)
}

// The trace of a request that was retried tells, without the log: which engine failed each attempt, why, and what came
// next.
func TestATraceTellsTheStoryOfARetry(t *testing.T) {
	file := filepath.Join(t.TempDir(), "spans.json")
	p1, d1 := startPair(t)
	p2, d2 := startPair(t)
	for _, p := range []*enginesim.Engine{p1, p2} {
		p.Inject(enginesim.Fault{Kind: enginesim.FaultReset, Leg: enginesim.LegPrefill})
	}
	for _, d := range []*enginesim.Engine{d1, d2} {
		d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Leg: enginesim.LegDecode})
	}
	g := start(t, gatewayYAML("")+simYAML("  kvConnector: {type: nixl, retry: {maxAttempts: 3, budget: 1}}\n", p1, d1,
		p2, d2), "-trace", file)
	status, _, _ := g.complete(`{"model":"tiny","prompt":"hi","max_tokens":2}`)
	require.Equal(t, http.StatusInternalServerError, status)
	got := strings.Join(story(t, file), "\n")
	names := strings.NewReplacer(strings.TrimPrefix(p1.URL(), "http://"), "P", strings.TrimPrefix(p2.URL(), "http://"),
		"P", strings.TrimPrefix(d1.URL(), "http://"), "D", strings.TrimPrefix(d2.URL(), "http://"), "D")
	assert.Equal(t, strings.Join([]string{
		"1 pd.prefill P: prefill_failed",
		"2 pd.prefill P: prefill_failed",
		"3 pd.prefill P: 200",
		"3 pd.decode D: 500 decode_failed",
		"pd.retry: prefill_failed at P, status none, since failed",
		"pd.retry: prefill_failed at P, status none, since failed",
		"pd.retry.skipped: decode_failed at D, status 500, since attempts",
	}, "\n"), names.Replace(got))
	lines := strings.Split(got, "\n")
	endpoint := func(i int) string { return strings.Trim(strings.Fields(lines[i])[2], ":") }
	assert.NotEqual(t, endpoint(0), endpoint(1), "the second attempt avoids the engine that failed")
	assert.Contains(t, lines[4], "at "+endpoint(0)+",")
	assert.Contains(t, lines[5], "at "+endpoint(1)+",")
	assert.Contains(t, lines[6], "at "+endpoint(3)+",")
}
