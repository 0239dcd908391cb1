// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
)

// A body that somebody may still read keeps its memory; one that was read to its end gives it to the next leg.
func TestALegsBodyKeepsItsMemoryWhileItIsRead(t *testing.T) {
	splice := func(prompt string) *legText {
		req, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"`+prompt+`"}`))
		require.NoError(t, err)
		text := new(legText)
		if pooled, ok := legTexts.Get().(*legText); ok {
			text = pooled
		}
		leg := connector.NewLeg(req)
		leg.Set("max_tokens", []byte("1"))
		require.NoError(t, leg.Splice(&text.Segments))
		return text
	}
	for _, whole := range []bool{false, true} {
		first := splice("mine")
		a, err := first.open()
		require.NoError(t, err)
		b, err := first.open()
		require.NoError(t, err)
		read, err := io.ReadAll(a)
		require.NoError(t, err)
		var begun [5]byte
		_, err = io.ReadFull(b, begun[:])
		require.NoError(t, err)
		if whole {
			rest, err := io.ReadAll(b)
			require.NoError(t, err)
			require.Equal(t, read, append(begun[:], rest...))
		}
		first.over()
		if whole {
			require.Zero(t, first.Len(), "nothing of a request stays in memory that waits for another")
			n, err := b.Read(begun[:])
			require.Zero(t, n)
			require.ErrorIs(t, err, io.EOF)
			continue
		}
		for range 10 { // would take the memory if it were free
			splice("another's")
		}
		rest := make([]byte, len(read))
		n, err := b.Read(rest)
		require.NoError(t, err)
		require.Equal(t, string(read), string(begun[:])+string(rest[:n]))
	}
}
