// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"strings"
	"testing"
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
