// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func simulation(t *testing.T, args ...string) (code int, out, errs string) {
	t.Helper()
	return pdctl(t, "", append([]string{"simulate"}, args...)...)
}

func TestSimulatePrintsATableTheSameEachTime(t *testing.T) {
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace.jsonl")
	args := []string{"--policies", "round-robin,prefix", "--slo-ttft", "1s"}
	first := append([]string{"--duration", "4", "--write", trace, "--plots", dir}, args...)
	code, out, errs := simulation(t, first...)
	require.Equal(t, exitOK, code, errs)
	require.Empty(t, errs)
	assert.Contains(t, out, "round-robin")
	assert.Contains(t, out, "goodput")
	_, again, _ := simulation(t, append([]string{"--trace", trace}, args...)...)
	assert.Equal(t, out, again, "the trace that was written is the one that was run")
	_, other, _ := simulation(t, append([]string{"--duration", "4", "--seed", "2"}, args...)...)
	assert.NotEqual(t, out, other)
	_, err := os.Stat(filepath.Join(dir, "picking-tail.png"))
	require.NoError(t, err)
	_, markdown, _ := simulation(t, "--duration", "4", "--policies", "prefix", "--markdown")
	assert.Contains(t, markdown, "\n| `prefix` | ")
}

func TestSimulateWritesFiguresForPrograms(t *testing.T) {
	code, out, errs := simulation(t, "--trace", "mooncake", "--requests", "300", "--speed", "2", "--policies", "prefix",
		"--blocks", "9000", "--json", "--slo-tpot", "1s")
	require.Equal(t, exitOK, code, errs)
	var rows []struct {
		Policy                      string
		Served, Failed, Preemptions int
		TTFTP50, ITLP99, Goodput    float64
	}
	require.NoError(t, json.Unmarshal([]byte(out), &rows))
	require.Len(t, rows, 1)
	assert.Equal(t, "prefix", rows[0].Policy)
	assert.Equal(t, 300, rows[0].Served+rows[0].Failed)
	assert.Positive(t, rows[0].TTFTP50)
	assert.Positive(t, rows[0].ITLP99)
	assert.Positive(t, rows[0].Goodput)
}

func TestSimulateRefusesWhatCannotBe(t *testing.T) {
	for _, args := range [][]string{{"--policies", "fastest"}, {"--prefill", "0"}, {"--zones", "0"}, {"--rate", "0"},
		{"--step", "1,2"}, {"--link", "-1"}, {"--blocks", "-1"}, {"--requests", "-1"}, {"--speed", "0"},
		{"--trace", "/no/such/file"}, {"--trace", "simulate_test.go"}, {"--slo-ttft", "-1s"}} {
		code, out, errs := simulation(t, append([]string{"--duration", "1"}, args...)...)
		assert.Equal(t, exitUsage, code, args)
		assert.Empty(t, out)
		assert.NotEmpty(t, errs)
	}
}
