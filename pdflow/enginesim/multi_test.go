// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func combined(t *testing.T) *scene {
	t.Helper()
	dir := t.TempDir()
	return newScene(t, func(p, d *enginesim.Config) {
		for _, c := range []*enginesim.Config{p, d} {
			c.Connector, c.KVRole, c.Extra = "multi", enginesim.RoleBoth, map[string]string{"shared_storage_path": dir}
		}
	})
}

// captures/multi/01: with NIXL's parameters D pulls, and P's answer is NIXL's alone.
func TestTheFirstChildWithThePromptServesIt(t *testing.T) {
	s := combined(t)
	body := completion("a")
	h := s.prefill(completions, body)
	assert.Len(t, h, 14)
	a := s.decode(completions, body, h)
	assert.Equal(t, s.alone(completions, body), a.text())
	assert.EqualValues(t, 240, s.d.Stats().ExternalKVTransfer)
	assert.EqualValues(t, 1, s.d.Stats().Transfers)
	assert.NoError(t, s.p.CheckKV())
}

// captures/multi/05.
func TestWithoutParametersTheStoreServes(t *testing.T) {
	s := combined(t)
	body := completion("a")
	s.prefillOnly(completions, body)
	assert.Equal(t, s.alone(completions, body), s.post(t.Context(), s.d, completions, body).text())
	assert.EqualValues(t, 224, s.d.Stats().ExternalKVTransfer)
	assert.Zero(t, s.d.Stats().Transfers)
}

// captures/multi/06.
func TestAFailedLoadHasNoSecondChance(t *testing.T) {
	s := combined(t)
	body := completion("a")
	h := s.prefill(completions, body)
	h["remote_engine_id"] = "another"
	a := s.decode(completions, body, h)
	require.Equal(t, 500, a.status)
	assert.Equal(t, internalError, a.get("error.message").String())
	s.alive(s.d)
}
