// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
)

// recordedTraffic writes what a gateway with one prefill and two decode engines has recorded: of 80 requests in 20 s,
// each with a prompt of 1,000 tokens of its own. A prefill engine computes 10,000 tokens a second.
func recordedTraffic(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "m.jsonl")
	r := record.New(record.Options{Header: record.Header{Model: "m", Share: 1,
		Policy: record.Spec{Mode: "threshold", UncachedTokens: 500}},
		Open: func() (io.WriteCloser, error) { return os.Create(file) }})
	speed := decide.Speed{Base: .01, PerRequest: 1e-4, PerContext: 1e-7, PerPrompt: 1e-4}
	begun := time.Now()
	for i := range 80 {
		prompt := fmt.Sprintf("%04d", i) + strings.Repeat("word", 999)
		request, err := connector.ParseRequest(connector.APICompletions, []byte(`{"model":"m","prompt":"`+prompt+`"}`))
		require.NoError(t, err)
		x := r.Sample(&pdflow.PickInput{Request: request})
		require.NotNil(t, x)
		x.Request, x.Time, x.Attempt = request, begun.Add(time.Duration(i)*250*time.Millisecond), 1
		x.Engines = [2][]string{{"p0"}, {"d0", "d1"}}
		x.Input = decide.Input{Prompt: 1000, Exact: true, TokenBytes: 1, Link: 20_000,
			Prefill: []decide.Candidate{{Speed: speed}}, Decode: []decide.Candidate{{Speed: speed, Alone: true},
				{Speed: speed, Alone: true}}}
		x.Decision = decide.Decision{Prefill: decide.Any, Decode: decide.Any}
		x.Prefill, x.Decode = "p0", "d0"
		x.Result = decide.Result{TTFT: 180 * time.Millisecond, ITL: 11 * time.Millisecond, Output: 40,
			Took: 700 * time.Millisecond}
		r.End(x)
	}
	r.Close()
	return file
}

func TestRecordedTrafficIsPlayedWithAnotherSetUp(t *testing.T) {
	file := recordedTraffic(t)
	code, out, errs := pdctl(t, "", "replay", file, "--policy", "never", "--decode", "1", "--slo-ttft", "1s")
	require.Equal(t, exitOK, code, errs)
	for _, row := range []string{"recorded: 1P 2D threshold", "the same, replayed", "error of the model",
		"what if: 1P 1D never", "change"} {
		assert.Contains(t, out, row)
	}
	code, out, errs = pdctl(t, "", "replay", file, "--policy", "never", "--decode", "1", "--slo-itl", "14ms", "--json")
	require.Equal(t, exitOK, code, errs)
	var a answered
	require.NoError(t, json.Unmarshal([]byte(out), &a))
	assert.Equal(t, 80, a.Recorded.Requests)
	assert.Equal(t, 80, a.WhatIf.Requests)
	assert.InDelta(t, .18, a.Recorded.TTFTP50, .001)
	assert.InEpsilon(t, .18, a.Replayed.TTFTP50, .1)
	assert.InDelta(t, 1, a.Replayed.Split, 1e-9)
	assert.Zero(t, a.WhatIf.Split)
	assert.InDelta(t, 1, a.Replayed.Goodput, 1e-9)
	assert.Less(t, a.WhatIf.Goodput, .5, "prefill between the tokens of all")
}

func TestAWhatIfNeedsAQuestionAndAFile(t *testing.T) {
	file := recordedTraffic(t)
	for _, args := range [][]string{{file}, {file, "--verify", "--policy", "never"}, {file, "--policy", "guess"},
		{file, "--decode", "-1"}, {file, "--policy", "never", "--pick", "fastest"}, {"nowhere", "--policy", "never"}} {
		code, _, errs := pdctl(t, "", append([]string{"replay"}, args...)...)
		assert.Equal(t, exitUsage, code, args)
		assert.NotEmpty(t, errs)
	}
}
