// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// The searches test eight bytes at once; each is held against a plain loop, on text dense in the bytes that matter and
// at all positions in a word.
func TestSearchesAgreeWithPlainLoops(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	alphabet := []byte("\"\\{}[]yY_\x7f\x1f\x20\x00\x01!#aZ,:09\x80\xa2\xdb\xfb\xfd\xff")
	plain := func(b []byte, i int, stop func(c byte) bool) int {
		for i < len(b) && !stop(b[i]) {
			i++
		}
		return i
	}
	for round := range 5_000 {
		b := make([]byte, rng.IntN(60))
		if round%10 == 0 {
			b = make([]byte, rng.IntN(20_000))
		}
		for i := range b {
			b[i] = 'x'
		}
		for range rng.IntN(8) {
			if len(b) > 0 {
				b[rng.IntN(len(b))] = alphabet[rng.IntN(len(alphabet))]
			}
		}
		i := rng.IntN(len(b) + 1)

		require.Equal(t, plain(b, i, func(c byte) bool { return c < 0x20 || c == '"' || c == '\\' }), nextSpecial(b, i),
			"%q", b)
		require.Equal(t, plain(b, 0, func(c byte) bool { return c < 0x20 }), nextControl(b), "%q", b)
		quote := plain(b, i, func(c byte) bool { return c == '"' })
		if quote == len(b) {
			quote = -1
		}
		require.Equal(t, quote, indexQuote(b, i), "%q", b)

		at := nextStructure(b, i)
		for at < len(b) && bytes.IndexByte([]byte("yY_\x7f"), b[at]) >= 0 { // the ones it may stop at needlessly
			at = nextStructure(b, at+1)
		}
		require.Equal(t, plain(b, i, func(c byte) bool { return bytes.IndexByte([]byte(`"{}[]`), c) >= 0 }), at, "%q",
			b)
	}
}

func TestClosingQuoteCountsBackslashes(t *testing.T) {
	for n := range 100 {
		b := append([]byte(`"`), bytes.Repeat([]byte(`\`), n)...)
		b = append(b, `"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"`...)
		want := n + 2
		if n%2 == 1 {
			want = len(b)
		}
		require.Equal(t, want, closingQuote(b, 0), "%d backslashes", n)
	}
	require.Equal(t, -1, closingQuote([]byte(`"\"`), 0))
	require.Equal(t, -1, closingQuote([]byte(`"`), 0))
}
