// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// recordedDecisions are of version 1, by a threshold of 100 tokens.
const recordedDecisions = "../../pdflow/decide/record/testdata/decisions.jsonl"

// changedDecisions is a record whose policy has another threshold than the one that decided.
func changedDecisions(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile(recordedDecisions)
	require.NoError(t, err)
	other := strings.Replace(string(raw), `"minPromptTokens":100`, `"minPromptTokens":1`, 1)
	require.NotEqual(t, string(raw), other)
	file := filepath.Join(t.TempDir(), "changed.jsonl")
	require.NoError(t, os.WriteFile(file, []byte(other), 0o600))
	return file
}

func TestRecordedDecisionsAreVerified(t *testing.T) {
	code, out, errs := pdctl(t, "", "replay", recordedDecisions, "--verify")
	assert.Equal(t, exitOK, code, errs)
	assert.Regexp(t, `^\S+/decisions.jsonl: model m, mode threshold, 1 of conversations from 20\S+\n`+
		`  (\d+) of (\d+) decisions are alike: 100 %\n$`, out)

	raw, err := os.ReadFile(recordedDecisions)
	require.NoError(t, err)
	code, out, errs = pdctl(t, string(raw[:len(raw)-20]), "replay", "-", "--verify")
	assert.Equal(t, exitOK, code, errs)
	assert.Contains(t, out, "  not read: 1 × a line that is cut off\n")
	assert.Contains(t, out, "100 %")
}

func TestADecisionThatIsAnotherNowIsShown(t *testing.T) {
	code, out, errs := pdctl(t, "", "replay", changedDecisions(t), "--verify")
	assert.Equal(t, exitFaults, code, errs)
	assert.Regexp(t, `\d+ of \d+ decisions are alike: \d\S* %
  The first difference: line \d+, decided at 20\S+ on a prompt of \d+ tokens:
  recorded: decode_alone at \S+, short
  now: +undecided between any and any\n$`, out)
}

func TestReplayNeedsARecord(t *testing.T) {
	for _, c := range [][2]string{{"replay_test.go", "does not begin as a record"}, {"/none", "no such file"}} {
		code, _, errs := pdctl(t, "", "replay", c[0], "--verify")
		assert.Equal(t, exitUsage, code)
		assert.Contains(t, errs, c[1])
	}
	code, _, errs := pdctl(t, "", "replay", recordedDecisions)
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "--verify")
	for flag, words := range map[string]string{"--prefill=0": "--prefill has a number of engines from 1 to 4096",
		"--decode=1000000": "--decode has a number", "--min-prompt-tokens=-4": "not below 0"} {
		code, _, errs := pdctl(t, "", "replay", recordedDecisions, flag)
		assert.Equal(t, exitUsage, code)
		assert.Contains(t, errs, words)
	}
}

// One of the files is of a gateway that was killed, one of a disk that was full, and one is two that were joined.
func TestAFileThatWasCutOffEndsNoReplay(t *testing.T) {
	raw, err := os.ReadFile(recordedTraffic(t))
	require.NoError(t, err)
	folder := t.TempDir()
	var files []string
	for name, text := range map[string][]byte{"a": raw, "b": nil, "c": raw[:9], "d": raw[:len(raw)-9],
		"e": append(raw[:len(raw)-9:len(raw)-9], raw...)} {
		files = append(files, filepath.Join(folder, name))
		require.NoError(t, os.WriteFile(files[len(files)-1], text, 0o600))
	}
	slices.Sort(files)
	told := func(errs string, more ...string) {
		for _, name := range []string{"b", "c"} {
			assert.Contains(t, errs, name+" is not read: it is empty, or cut off before its first decision\n")
		}
		for _, line := range more {
			assert.Contains(t, errs, line+": not read: 1 × a line that is cut off\n")
		}
	}
	code, out, errs := pdctl(t, "", append([]string{"replay", "--verify"}, files...)...)
	assert.Equal(t, exitOK, code, errs)
	assert.Equal(t, 3, strings.Count(out, "are alike: 100 %"), out)
	assert.Contains(t, out, "159 of 159")
	told(errs)
	code, out, errs = pdctl(t, "", append([]string{"replay", "--policy=never", "--json"}, files...)...)
	assert.Equal(t, exitOK, code, errs)
	var a answered
	require.NoError(t, json.Unmarshal([]byte(out), &a))
	assert.Equal(t, 80+79+79+80, a.Recorded.Requests)
	assert.Equal(t, 2, a.Unread)
	told(errs, "d", "e")
	assert.Contains(t, errs, "d: the first of these is line ")
	for _, args := range [][]string{{"--verify"}, {"--policy=never"}} {
		code, _, errs = pdctl(t, "", append([]string{"replay", files[1], files[2]}, args...)...)
		assert.Equal(t, exitUsage, code)
		assert.Contains(t, errs, "no decision")
	}
}
