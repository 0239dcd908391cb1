// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"maps"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

// pooling are engines with one pool between them, and further settings of D's.
func pooling(t *testing.T, more map[string]string) func(p, d *enginesim.Config) {
	pool := t.TempDir()
	return func(p, d *enginesim.Config) {
		p.Connector, d.Connector = "mooncake-store", "mooncake-store"
		p.Extra = map[string]string{"store": pool}
		d.Extra = maps.Clone(p.Extra)
		maps.Copy(d.Extra, more)
	}
}

// storeLegs runs P, then D, with nothing of P's answer.
func (s *scene) storeLegs(body obj) answer {
	s.t.Helper()
	require.Equal(s.t, 200, s.post(s.t.Context(), s.p, completions, with(body, obj{"max_tokens": 1})).status)
	return s.post(s.t.Context(), s.d, completions, body)
}

// D finds whole blocks, and computes what is left of the prompt (protocols/vllm.md §5.1).
func TestMooncakeStoreSharesWholeBlocks(t *testing.T) {
	s := newScene(t, pooling(t, nil))
	body := with(completion("x"), obj{"prompt": prompt(250, "x")})
	a := s.storeLegs(body)
	require.Equal(t, 200, a.status, a.body)
	assert.Equal(t, s.alone(completions, body), a.text())
	d := s.d.Stats()
	assert.EqualValues(t, 224, d.ExternalKVTransfer, "7 blocks of 32")
	assert.EqualValues(t, 26, d.LocalCompute)
	assert.Zero(t, d.BytesTransferred)
	assert.NoError(t, s.p.CheckKV())
	assert.NoError(t, s.d.CheckKV())
	assert.Contains(t, s.get(s.p, "/metrics").body, `vllm:mooncake_store_operation_bytes_total{engine="0",model_name="tiny",operation="save_put",status="ok"} 3584.0`)
	assert.Contains(t, s.get(s.d, "/metrics").body, `vllm:mooncake_store_operation_bytes_total{engine="0",model_name="tiny",operation="load_get",status="ok"} 3584.0`)
}

// A prefix that another prompt has put is found too, and a prompt is found again by any number of requests.
func TestMooncakeStoreFindsPrefixes(t *testing.T) {
	s := newScene(t, pooling(t, nil))
	require.Equal(t, 200, s.storeLegs(completion("x")).status)
	s.http.CloseIdleConnections() // a POST is not sent again
	require.NoError(t, s.d.Restart())
	longer := with(completion("x"), obj{"prompt": prompt(400, "x")})
	a := s.post(t.Context(), s.d, completions, longer)
	assert.Equal(t, s.alone(completions, longer), a.text())
	assert.EqualValues(t, 224, s.d.Stats().ExternalKVTransfer)
}

// Nothing is shared, and nothing fails, where the engines' settings differ: the answer is right, and computed twice.
func TestMooncakeStoreMisses(t *testing.T) {
	for name, more := range map[string]map[string]string{
		"another hash seed": {"hash_seed": "1"}, "another prefix": {"cache_prefix": "b"}, "another pool": {"store": t.TempDir()},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, pooling(t, more))
			a := s.storeLegs(completion("x"))
			assert.Equal(t, s.alone(completions, completion("x")), a.text())
			assert.EqualValues(t, 240, s.d.Stats().LocalCompute)
			assert.Equal(t, enginesim.KVNoTransfer, firstFault(t, s.d))
		})
	}
	t.Run("a prompt shorter than a block", func(t *testing.T) {
		s := newScene(t, pooling(t, nil))
		s.storeLegs(with(completion("x"), obj{"prompt": "short"}))
		assert.EqualValues(t, 5, s.d.Stats().LocalCompute)
	})
	_, err := enginesim.Start(enginesim.Config{Connector: "mooncake-store"})
	require.ErrorContains(t, err, "folder")
}
