// SPDX-License-Identifier: Apache-2.0

package load

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// direct returns a client that does both legs itself.
func direct(t *testing.T, board *Board, plan *Plan, meter *Meter) *Client {
	t.Helper()
	engines, err := StartEngines(t.Context(), board, 1)
	require.NoError(t, err)
	t.Cleanup(engines.Close)
	c := NewClient(board, 0, Target{Prefill: engines.Prefill[0], Decode: engines.Decode[0]}, plan, meter)
	t.Cleanup(c.Close)
	return c
}

func TestAClientWithARateWaitsBetweenRequests(t *testing.T) {
	const every = 20 * time.Millisecond
	meter, stop := &Meter{}, &atomic.Bool{}
	c := direct(t, NewBoard(), &Plan{Prompt: NewPrompt(2<<10, false), Every: every, Phase: every}, meter)
	start := time.Now()
	go func() {
		defer stop.Store(true)
		for time.Since(start) < 10*every || meter.Requests.Load() == 0 && time.Since(start) < 20*time.Second {
			time.Sleep(every)
		}
	}()
	c.Run(t.Context(), stop)
	most := int64(time.Since(start) / every)
	assert.Positive(t, meter.Requests.Load())
	assert.LessOrEqual(t, meter.Requests.Load(), most)
	assert.Zero(t, meter.Failed.Load())
}

func TestByMeaningStreamsThatAreByteForByteRightAreAccepted(t *testing.T) {
	plan := &Plan{Prompt: NewPrompt(2<<10, true), Chunks: 50, PerWrite: 3}
	c := direct(t, NewBoardByMeaning(), plan, &Meter{})
	for range 3 {
		require.NoError(t, c.Ask(t.Context()))
	}
}
