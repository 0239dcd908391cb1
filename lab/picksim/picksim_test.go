// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func results(t *testing.T, seed uint64, seconds float64, policies ...pick.Policy) []*result {
	t.Helper()
	g := usualLoad()
	g.seconds = seconds
	jobs, err := prepare(g.generate(seed))
	require.NoError(t, err)
	var all []*result
	for _, p := range policies {
		r, err := simulate(context.Background(), usualFleet(), p, seed, jobs)
		require.NoError(t, err)
		require.Len(t, r.whole, len(jobs), "each request ends")
		all = append(all, r)
	}
	return all
}

func TestPrefixAffinityReusesMoreThanRoundRobinWithoutAWorseTail(t *testing.T) {
	for seed := range uint64(2) {
		r := results(t, seed, 60, pick.RoundRobin(), pick.PrefixAffinity())
		turns, prefix := r[0], r[1]
		require.Greater(t, prefix.reuse(), turns.reuse()+8)
		for _, q := range []float64{.5, .9, .99} {
			require.LessOrEqual(t, quantile(prefix.first, q), quantile(turns.first, q), "time to the first token at %v",
				q)
			require.LessOrEqual(t, quantile(prefix.whole, q), 1.02*quantile(turns.whole, q), "whole time at %v", q)
		}
	}
}

// docs/picking.md shows the table and the plots that this program makes. Make them again after a change of a policy.
func TestTheDocumentedFiguresAreTheProgramsOwn(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("where products are added in one step, the last digits differ")
	}
	page, err := os.ReadFile("../../docs/picking.md")
	require.NoError(t, err)
	r := results(t, 1, usualLoad().seconds, pick.RoundRobin(), pick.PrefixAffinity(), pick.Sticky())
	for _, x := range r {
		require.Contains(
			t, string(page), fmt.Sprintf("| `%s` | %.1f %% | %.2f | %.2f | %.0f ms | %.0f ms | %.2f s | %d | "+
				"%.0f %% |\n", x.policy, x.reuse(), imbalance(x.prefillLoad),
				imbalance(x.decodeLoad), 1000*quantile(x.first, .5), 1000*quantile(x.first, .99),
				quantile(x.whole, .99),
				x.pairs, 100*float64(x.crossed)/float64(len(x.first))))
	}
	require.Greater(t, r[1].reuse(), r[0].reuse()+15)
	require.Less(t, quantile(r[1].first, .99), quantile(r[0].first, .99)*2/3)
}

func TestASimulationIsTheSameEachTime(t *testing.T) {
	for _, name := range pick.Policies() {
		p, err := pick.ParsePolicy(name)
		require.NoError(t, err)
		r := results(t, 1, 4, p, p)
		require.Equal(t, r[0], r[1], name)
	}
}

func TestStickyPairsMeetSeldomAndZonesStayApart(t *testing.T) {
	r := results(t, 1, 15, pick.TwoChoices(), pick.Sticky(), pick.ZoneFirst(""))
	require.Less(t, r[1].pairs, r[0].pairs*2/3)
	require.Less(t, r[2].crossed, r[0].crossed/10)
}

func TestATraceIsReadAsItWasWritten(t *testing.T) {
	g := usualLoad()
	g.seconds = 5
	name := filepath.Join(t.TempDir(), "trace.jsonl")
	require.NoError(t, writeTrace(name, g.generate(7)))
	back, err := readTrace(name)
	require.NoError(t, err)
	require.Equal(t, g.generate(7), back)
}

func TestMooncakesTracesAreRead(t *testing.T) {
	name := filepath.Join(t.TempDir(), "trace.jsonl")
	require.NoError(
		t, os.WriteFile(name, []byte(`{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 3]}
{"timestamp": 1500, "input_length": 512, "output_length": 9, "hash_ids": [1]}
`), 0o600))
	trace, err := readTrace(name)
	require.NoError(t, err)
	require.Equal(t, []entry{
		{At: 1.5, Segments: []segment{{"block-1", 2048}}, Output: 9},
		{At: 3, Segments: []segment{{"block-1", 2048}, {"block-3", 352}}, Output: 5},
	}, trace)
	jobs, err := prepare(trace)
	require.NoError(t, err)
	require.Equal(t, jobs[0].blocks, jobs[1].blocks[:len(jobs[0].blocks)], "the same block is the same text")
}

func TestWhatIsWrongWithATraceIsSaid(t *testing.T) {
	for line, says := range map[string]string{
		"":                    "empty",
		"{":                   "line 1",
		`{"at":1,"output":3}`: "prompt",
		`{"at":-1,"output":3,"segments":[{"id":"a","bytes":9}]}`:          "time",
		`{"at":1,"output":0,"segments":[{"id":"a","bytes":9}]}`:           "output",
		`{"at":1,"output":1,"segments":[{"id":"a","bytes":-9}]}`:          "segment",
		`{"at":1,"output":1,"segments":[{"id":"a","bytes":99000000000}]}`: "segment",
	} {
		name := filepath.Join(t.TempDir(), "trace.jsonl")
		require.NoError(t, os.WriteFile(name, []byte(line), 0o600))
		_, err := readTrace(name)
		require.ErrorContains(t, err, says, line)
	}
}

func TestTheProgramPrintsATableAndDraws(t *testing.T) {
	dir := t.TempDir()
	var out bytes.Buffer
	args := []string{"-seconds", "10", "-policies", "round-robin,prefix", "-plots", dir, "-write",
		filepath.Join(dir, "trace.jsonl")}
	require.NoError(t, run(context.Background(), args, &out, &out))
	first := out.String()
	require.Contains(t, first, "round-robin")
	require.Contains(t, first, "prefix")
	for _, name := range []string{"picking-reuse.png", "picking-balance.png", "picking-tail.png"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(string(b), "\x89PNG"))
	}
	out.Reset()
	require.NoError(
		t, run(context.Background(), append([]string{"-trace", filepath.Join(dir, "trace.jsonl")}, args[2:4]...), &out,
			&out),
	)
	require.Equal(t, first, out.String(), "the trace that was written is the one that was run")
	require.Error(t, run(context.Background(), []string{"-policies", "fastest"}, &out, &out))
	require.Error(t, run(context.Background(), []string{"-prefill", "0"}, &out, &out))
}
