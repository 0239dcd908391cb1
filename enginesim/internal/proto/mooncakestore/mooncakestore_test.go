// SPDX-License-Identifier: Apache-2.0

package mooncakestore_test

import (
	"maps"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

// D finds whole blocks, and computes what is left of the prompt (docs/protocols/mooncake-store.md).
func TestMooncakeStoreSharesWholeBlocks(t *testing.T) {
	s := simtest.New(t, pooling(t, nil))
	body := simtest.With(simtest.Completion("x"), simtest.Obj{"prompt": simtest.Prompt(250, "x")})
	a := s.Silent(body)
	s.Right(body, a)
	d := s.D.Stats()
	assert.EqualValues(t, 224, d.ExternalKVTransfer, "7 blocks of 32")
	assert.EqualValues(t, 26, d.LocalCompute)
	assert.Zero(t, d.BytesTransferred)
	s.Clean()
	assert.Contains(t, s.Get(s.P, "/metrics").Body,
		`vllm:mooncake_store_operation_bytes_total{engine="0",model_name="tiny",operation="save_put",`+
			`status="ok"} 3584.0`)
	assert.Contains(t, s.Get(s.D, "/metrics").Body,
		`vllm:mooncake_store_operation_bytes_total{engine="0",model_name="tiny",operation="load_get",`+
			`status="ok"} 3584.0`)
}

// A prefix that another prompt has put is found too, and a prompt is found again by any number of requests.
func TestMooncakeStoreFindsPrefixes(t *testing.T) {
	s := simtest.New(t, pooling(t, nil), simtest.OwnPorts(t))
	require.Equal(t, 200, s.Silent(simtest.Completion("x")).Status)
	s.HTTP.CloseIdleConnections() // a POST is not sent again
	require.NoError(t, s.D.Restart())
	longer := simtest.With(simtest.Completion("x"), simtest.Obj{"prompt": simtest.Prompt(400, "x")})
	a := s.Ask(s.D, longer)
	s.Right(longer, a)
	assert.EqualValues(t, 224, s.D.Stats().ExternalKVTransfer)
}

// Nothing is shared, and nothing fails, where the engines' settings differ: the response is right, and computed twice.
func TestMooncakeStoreMisses(t *testing.T) {
	for name, more := range map[string]map[string]string{
		"another hash seed": {"hash_seed": "1"}, "another prefix": {"cache_prefix": "b"},
		"another pool": {"store": t.TempDir()},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, pooling(t, more))
			a := s.Silent(simtest.Completion("x"))
			s.Right(simtest.Completion("x"), a)
			assert.EqualValues(t, 240, s.D.Stats().LocalCompute)
			assert.Equal(t, enginesim.KVNoTransfer, simtest.FirstFault(t, s.D))
		})
	}
	t.Run("a prompt shorter than a block", func(t *testing.T) {
		s := simtest.New(t, pooling(t, nil))
		s.Silent(simtest.With(simtest.Completion("x"), simtest.Obj{"prompt": "short"}))
		assert.EqualValues(t, 5, s.D.Stats().LocalCompute)
	})
	_, err := enginesim.Start(enginesim.Config{Connector: "mooncake-store"})
	require.ErrorContains(t, err, "folder")
}
