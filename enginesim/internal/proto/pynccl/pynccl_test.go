// SPDX-License-Identifier: Apache-2.0

package pynccl_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestALookupBufferGivesAPromptOnce(t *testing.T) {
	port, err := freeport.One()
	require.NoError(t, err)
	s := simtest.New(t, func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "pynccl", "pynccl"
		p.SideChannel, d.Extra = "127.0.0.1:"+port, map[string]string{"kv_ip": "127.0.0.1", "kv_port": port}
	})
	for range 2 { // the same prompt twice
		s.PrefillOnly(simtest.Completion("a"))
	}
	for range 2 {
		assert.Equal(t, s.Alone(simtest.Completion("a")), s.Ask(s.D, simtest.Completion("a")).Text())
	}
	s.Clean()
	assert.Positive(t, s.D.Stats().ExternalKVTransfer)
	s.Unanswered(simtest.Completion("a"))
}
