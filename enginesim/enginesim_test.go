// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"go.uber.org/goleak"

	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDecodeWithHandoffGivesTheTextOfOneEngine(t *testing.T) {
	for _, path := range []string{simtest.Completions, simtest.Chat} {
		t.Run(path, func(t *testing.T) {
			s := simtest.New(t)
			body := simtest.Request(path, "one", 24)
			got := s.Pair(body)
			s.Right(body, got)
			assert.Len(t, got.Text(), 24)

			d, n := s.D.Stats(), got.Get("usage.prompt_tokens").Int()
			assert.Equal(t, n, d.ExternalKVTransfer, "tokens read from P")
			assert.Zero(t, d.LocalCompute, "tokens computed on D")
			assert.Equal(t, (n+simtest.Block-1)/simtest.Block*simtest.Block*16, d.BytesTransferred)
			s.Clean()
		})
	}
}
