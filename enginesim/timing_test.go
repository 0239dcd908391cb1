// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bufio"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
	"github.com/pdkit/pdkit/enginesim/model"
)

// timed is an engine whose steps are long beside what a busy machine adds to them.
func timed() *model.Spec {
	return &model.Spec{
		StepTime:   model.StepTime{Base: .04, PerPrefillToken: .001},
		StepTokens: 200, MaxRunning: 64, Blocks: 1024, BlockSize: 16, BytesPerToken: 1000,
	}
}

// stream asks for a stream and returns when each of its tokens came, from now on.
func stream(t *testing.T, e *enginesim.Engine, body simtest.Obj) (tokens []time.Duration) {
	t.Helper()
	data, err := json.Marshal(simtest.Streamed(body))
	assert.NoError(t, err)
	begun := time.Now()
	resp, err := http.Post(e.URL()+"/v1/completions", "application/json", strings.NewReader(string(data)))
	if !assert.NoError(t, err) {
		return nil
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "data: {") {
			tokens = append(tokens, time.Since(begun))
		}
	}
	return tokens
}

func TestWithTimingTokensComeAtTheModelsPace(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{Timing: timed()})
	require.NoError(t, err)
	defer e.Close()
	defer http.DefaultClient.CloseIdleConnections()
	body := simtest.Obj{"prompt": strings.Repeat("a", 100), "max_tokens": 5}
	got := stream(t, e, body)
	require.GreaterOrEqual(t, len(got), 5)
	assert.GreaterOrEqual(t, got[0], 140*time.Millisecond, "a step, and 100 tokens")
	assert.Less(t, got[0], 700*time.Millisecond)
	assert.GreaterOrEqual(t, got[4], 300*time.Millisecond, "four more steps")
	again := stream(t, e, body)
	assert.Less(t, again[0], got[0]-50*time.Millisecond, "what is cached is not computed again")
}

// While another prompt is computed, each step of a stream takes as long as a chunk of it.
func TestWithTimingAPromptSlowsTheStreamsOfOthers(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{Timing: timed()})
	require.NoError(t, err)
	defer e.Close()
	defer http.DefaultClient.CloseIdleConnections()
	var one []time.Duration
	var wg sync.WaitGroup
	wg.Go(func() { one = stream(t, e, simtest.Obj{"prompt": "b", "max_tokens": 20}) })
	time.Sleep(100 * time.Millisecond)
	other := stream(t, e, simtest.Obj{"prompt": strings.Repeat("c", 600), "max_tokens": 1})
	wg.Wait()
	require.NotEmpty(t, other)
	assert.GreaterOrEqual(t, other[0], 720*time.Millisecond, "600 tokens in three chunks or four")
	slow := 0
	for i := 1; i < len(one); i++ {
		if one[i]-one[i-1] > 150*time.Millisecond {
			slow++
		}
	}
	assert.GreaterOrEqual(t, slow, 2)
	assert.Less(t, slow, 12, "only while the prompt is computed")
}

func TestWithTimingKVTakesItsTimeOverTheLink(t *testing.T) {
	p, d, err := enginesim.Pair(enginesim.Config{Timing: timed()},
		enginesim.Config{Timing: timed(), Link: model.Link{Latency: .05, BytesPerSecond: 1e6}})
	require.NoError(t, err)
	defer p.Close()
	defer d.Close()
	defer http.DefaultClient.CloseIdleConnections()
	prompt := strings.Repeat("d", 320)
	first := ask(p, map[string]any{"prompt": prompt, "max_tokens": 1,
		"kv_transfer_params": map[string]any{"do_remote_decode": true}})
	got := stream(t, d, simtest.Obj{"prompt": prompt, "max_tokens": 2,
		"kv_transfer_params": first["kv_transfer_params"]})
	require.NotEmpty(t, got)
	assert.GreaterOrEqual(t, got[0], 400*time.Millisecond, "320 KB over the link, and a step")
	assert.NoError(t, p.CheckKV())
	assert.NoError(t, d.CheckKV())
	assert.Zero(t, d.Stats().LocalCompute)
}

func TestTimingIsCheckedAndGivesTheEngineItsMemory(t *testing.T) {
	for _, c := range []enginesim.Config{
		{Timing: &model.Spec{}}, {Timing: timed(), ITL: time.Second}, {Timing: timed(), PrefillRate: 1},
		{Link: model.Link{Latency: -1}},
	} {
		_, err := enginesim.Start(c)
		require.Error(t, err)
	}
	spec := timed()
	spec.Blocks = 4
	e, err := enginesim.Start(enginesim.Config{Timing: spec})
	require.NoError(t, err)
	defer e.Close()
	defer http.DefaultClient.CloseIdleConnections()
	response := ask(e, map[string]any{"prompt": strings.Repeat("e", 80), "max_tokens": 1})
	assert.NotNil(t, response["error"], "80 tokens do not fit 4 blocks of 16")
}

// A client that leaves takes its request out of the engine's steps.
func TestWithTimingNothingRunsOnAfterItsClientHasLeft(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{Timing: timed()})
	require.NoError(t, err)
	defer e.Close()
	defer http.DefaultClient.CloseIdleConnections()
	client := &http.Client{Timeout: 150 * time.Millisecond}
	resp, err := client.Post(e.URL()+"/v1/completions", "application/json",
		strings.NewReader(`{"prompt":"f","max_tokens":1000}`))
	if err == nil {
		resp.Body.Close()
	}
	client.CloseIdleConnections()
	require.NoError(t, e.WaitIdle(t.Context()))
	assert.EqualValues(t, 1, e.Stats().Aborted)
	assert.NotEmpty(t, stream(t, e, simtest.Obj{"prompt": "g", "max_tokens": 2}), "and the engine goes on")
}
