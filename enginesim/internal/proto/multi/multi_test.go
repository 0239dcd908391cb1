// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func combined(t *testing.T) *simtest.Scene {
	t.Helper()
	dir := t.TempDir()
	return simtest.New(t, func(p, d *enginesim.Config) {
		for _, c := range []*enginesim.Config{p, d} {
			c.Connector, c.KVRole, c.Extra = "multi", enginesim.RoleBoth, map[string]string{"shared_storage_path": dir}
		}
	})
}

// docs/protocols/multi.md, recording 01: with NIXL's parameters D pulls, and P's response is NIXL's alone.
func TestTheFirstChildWithThePromptServesIt(t *testing.T) {
	s := combined(t)
	body := simtest.Completion("a")
	h := s.Prefill(body)
	assert.Len(t, h, 14)
	a := s.Decode(body, h)
	s.Right(body, a)
	assert.EqualValues(t, 240, s.D.Stats().ExternalKVTransfer)
	assert.EqualValues(t, 1, s.D.Stats().Transfers)
	assert.NoError(t, s.P.CheckKV())
}

// docs/protocols/multi.md, recording 05.
func TestWithoutParametersTheStoreServes(t *testing.T) {
	s := combined(t)
	body := simtest.Completion("a")
	s.PrefillOnly(body)
	s.Right(body, s.Ask(s.D, body))
	assert.EqualValues(t, 224, s.D.Stats().ExternalKVTransfer)
	assert.Zero(t, s.D.Stats().Transfers)
}

// docs/protocols/multi.md, recording 06.
func TestAFailedLoadHasNoSecondChance(t *testing.T) {
	s := combined(t)
	body := simtest.Completion("a")
	h := s.Prefill(body)
	h["remote_engine_id"] = "another"
	a := s.Decode(body, h)
	require.Equal(t, 500, a.Status)
	assert.Equal(t, simtest.InternalError, a.Get("error.message").String())
	s.Alive(s.D)
}
