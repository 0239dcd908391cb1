// SPDX-License-Identifier: Apache-2.0

package record_test

import (
	"bytes"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
)

// A file comes from a disk that anybody may have written to. Whatever it says, reading ends, and what is read can be
// decided on.
func FuzzRead(f *testing.F) {
	raw, err := os.ReadFile("testdata/decisions.jsonl")
	require.NoError(f, err)
	f.Add(raw)
	f.Add(raw[:len(raw)/2])
	f.Add(append(raw[:len(raw)/2:len(raw)/2], raw...)) // cut off, and joined
	policy := decide.Predicted(decide.PredictedOptions{TTFT: time.Second})
	f.Fuzz(func(t *testing.T, raw []byte) {
		_, _ = record.Verify(bytes.NewReader(raw))
		_, entries, err := record.Read(bytes.NewReader(raw))
		if err != nil {
			return
		}
		for e, err := range entries {
			if err != nil {
				continue
			}
			require.Len(t, e.Engines[0], len(e.Input.Prefill))
			require.Len(t, e.Engines[1], len(e.Input.Decode))
			var d decide.Decision
			policy.Decide(&e.Input, &d)
			_ = (&record.Difference{Entry: e, Now: d}).String()
		}
	})
}
