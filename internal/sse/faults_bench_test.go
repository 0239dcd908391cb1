// SPDX-License-Identifier: Apache-2.0

package sse_test

import (
	"strings"
	"testing"

	"github.com/pdkit/pdkit/internal/sse"
)

// BenchmarkFaults is a stream without an error: chunks that come one by one, and many in one read.
func BenchmarkFaults(b *testing.B) {
	const event = tokenEvent + "}\n\n"
	for _, c := range []struct{ name, piece string }{{"paced", event}, {"coalesced", strings.Repeat(event, 100)}} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.piece)))
			p := make([]byte, len(c.piece))
			var f sse.Faults
			f.Watch(&endless{[]byte(c.piece), b.N}, nil)
			for {
				if _, err := f.Read(p); err != nil {
					return
				}
			}
		})
	}
}
