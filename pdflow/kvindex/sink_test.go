// SPDX-License-Identifier: Apache-2.0

package kvindex_test

import (
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery/kvevents"
	"github.com/pdkit/pdkit/pdflow/kvindex"
)

// What vLLM 0.32.0 sent from its start on (discovery/kvevents/testdata/record.py), through the door that
// discovery/kvevents uses. A token of the model is a byte; blocks have 32; the engine has 48 of them.
func TestTheEventsOfARealEngineTellWhatItHolds(t *testing.T) {
	f, err := os.Open("../../discovery/kvevents/testdata/vllm-0.32.0/events.json.gz")
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	var r struct {
		Replay   [][]string
		Requests []struct{ Prompt string }
	}
	require.NoError(t, json.NewDecoder(z).Decode(&r))
	x := kvindex.New()
	sink := x.Sink()
	src := kvevents.Source{Engine: "e", Model: "tiny"}
	from, needed := sink.ReplayFrom(src)
	require.Zero(t, from)
	require.True(t, needed)
	now := time.Now()
	for i, m := range r.Replay[:len(r.Replay)-1] {
		payload, err := hex.DecodeString(m[len(m)-1])
		require.NoError(t, err)
		require.NoError(t, sink.Replayed(src, uint64(i), payload, now))
	}
	require.False(t, sink.ReplayEnd(src, true, now))
	assert.Equal(t, kvindex.Exact, x.State("e").State)
	held := func(prompt string) int {
		var ids []uint32
		for _, b := range []byte(prompt) {
			ids = append(ids, uint32(b))
		}
		for _, hit := range x.Match(&kvindex.Query{Model: "tiny", Tokens: ids}, nil) {
			return hit.Device
		}
		return 0
	}
	last := r.Requests[len(r.Requests)-1].Prompt
	assert.Equal(t, len(last)/32*32, held(last))
	assert.Zero(t, held(r.Requests[5].Prompt), "it was evicted long ago")
	sink.Lost(src, now)
	assert.Equal(t, kvindex.Unknown, x.State("e").State)
	assert.NotZero(t, held(last))
	sink.Gone(src, now)
	assert.Equal(t, kvindex.Unknown, x.State("e").State)
	assert.Zero(t, held(last))
	sink.Forget("e")
	assert.Zero(t, held(last))
}
