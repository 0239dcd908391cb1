// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkChunks decodes chunks as uvicorn writes them: an event in each.
func BenchmarkChunks(b *testing.B) {
	src := []byte(strings.Repeat("ef\r\n"+strings.Repeat("x", 0xef)+"\r\n", 100))
	dst := make([]byte, len(src))
	b.SetBytes(int64(len(src)))
	var d chunks
	for b.Loop() {
		if _, _, err := d.decode(dst, src); err != nil {
			b.Fatal(err)
		}
	}
}

// Frames of chunks are decoded at once where they are plain and whole, and byte by byte where a read has cut them. Both
// must come to the same.
func TestChunksAreDecodedAlikeHoweverTheyAreCut(t *testing.T) {
	const long = "10\r\n0123456789abcdef\r\n"
	for _, text := range []string{
		long + "0\r\n\r\n", "1\r\na\r\n2\r\nbc\r\n0\r\nX: 1\r\n\r\nmore",
		"A\r\n0123456789\r\na;x=y\r\n0123456789\r\n0\r\n\r\n",
		"00000001\r\na\r\n", "000000001\r\na\r\n0\r\n\r\n", "0000000000000001\r\na\r\n", "00000000000000001\r\na\r\n",
		"ffffffff\r\na", "7fffffffffffffff\r\na", "\r\n", "g\r\n", "1\na", "1\r\nab\r\n", "1\r\na\r1", "1\r\na\n",
		"1 \r\na\r\n",
		" 1\r\n", "1\r\na\r\n\r\n", "-1\r\n", strings.Repeat(long, 3) + "1", strings.Repeat("1;"+strings.Repeat("x",
			1000)+"\r\na\r\n", 20),
	} {
		var byByte chunks
		var want []byte
		var wantErr error
		used := 0
		for one := [1]byte{}; used < len(text) && wantErr == nil; {
			var n, u int
			n, u, wantErr = byByte.decode(one[:], []byte(text[used:used+1]))
			want = append(want, one[:n]...)
			used += u
		}
		for room := range 20 {
			for cut := range len(text) + 1 {
				if len(text) > 1000 && cut%97 > 0 {
					continue
				}
				var d chunks
				var got []byte
				var err error
				taken, dst := 0, make([]byte, room+1)
				for _, end := range []int{cut, len(text)} {
					for taken < end && err == nil {
						var n, u int
						n, u, err = d.decode(dst, []byte(text[taken:end]))
						got = append(got, dst[:n]...)
						taken += u
					}
				}
				require.Equal(t, string(want), string(got), "%.60q cut at %d, room for %d", text, cut, room+1)
				require.Equal(t, wantErr, err, "%.60q cut at %d, room for %d", text, cut, room+1)
				require.Equal(t, used, taken, "%.60q cut at %d, room for %d", text, cut, room+1)
				require.Equal(t, byByte, d, "%.60q cut at %d, room for %d", text, cut, room+1)
			}
		}
	}
}
