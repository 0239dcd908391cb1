// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

// BenchmarkBothLegs is one prefill with its decode of 16 tokens over HTTP, each time for a new prompt.
func BenchmarkBothLegs(b *testing.B) {
	for _, size := range []int{2 << 10, 128 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size>>10, "KiB"), func(b *testing.B) {
			s := simtest.New(b, func(p, _ *enginesim.Config) {
				p.Blocks, p.MaxModelLen, p.BytesPerToken, p.KeepRequests = size/simtest.Block+64, size+64, 8, -1
			})
			rest := strings.Repeat("x", size-16)
			for i := 0; b.Loop(); i++ {
				body := simtest.Obj{"prompt": fmt.Sprintf("%016d", i) + rest, "max_tokens": 16}
				require.Equal(b, 200, s.Decode(body, s.Prefill(body)).Status)
			}
		})
	}
}

// BenchmarkStream is one stream of 512 tokens without latency.
func BenchmarkStream(b *testing.B) {
	s := simtest.New(b)
	body := simtest.With(simtest.Completion("x"), simtest.Obj{"stream": true, "max_tokens": 512})
	for b.Loop() {
		require.Equal(b, 200, s.Post(b.Context(), s.O, simtest.Completions, body).Status)
	}
}
