// SPDX-License-Identifier: Apache-2.0

package mooncakestore_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/mooncakestore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newConnector(t testing.TB, o *mooncakestore.Options) *mooncakestore.Connector {
	t.Helper()
	c, err := mooncakestore.New(o)
	require.NoError(t, err)
	return c
}

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(mooncakestore.Name), "testdata/golden")
}

func harness() connectortest.Harness {
	return connectortest.Harness{
		Name: mooncakestore.Name,
		Config: json.RawMessage(`{"settleTime":"30s","mode":"embedded","metadata_server":"http://m:8080/metadata",` +
			`"master_server_address":"m:50052","protocol":"tcp",` +
			`"device_name":"mlx5_0","global_segment_size":"80GB","local_buffer_size":1073741824,` +
			`"enable_offload":true,"tenant_id":"a","local_hostname":"h","preferred_segment":"o:50053",` +
			`"load_async":false,"lookup_async":true,"lookup_rpc_port":7,"cache_prefix":"p","save_decode_cache":true,` +
			`"store_tp_size":4,"enable_store_tp_lcm":true,"prefill_tp_sizes":[4,2]}`),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"settleTime":5}`), json.RawMessage(`{"mode":"other"}`),
			json.RawMessage(`{"mode":"standalone-store","global_segment_size":"1GB"}`),
			json.RawMessage(`{"global_segment_size":0}`), json.RawMessage(`{"global_segment_size":"80GiB"}`),
			json.RawMessage(`{"local_buffer_size":"0GB"}`),
			json.RawMessage(`{"local_buffer_size":-1}`), json.RawMessage(`{"master_server_address":"m"}`),
			json.RawMessage(`{"lookup_rpc_port":70000}`),
			json.RawMessage(`{"store_tp_size":-1}`), json.RawMessage(`{"prefill_tp_sizes":[4,0]}`),
		},
	}
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness()) }

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness()) }

func TestAbilities(t *testing.T) {
	c, err := connector.Open(
		config.Spec{Type: "MooncakeStoreConnector", Config: json.RawMessage(`{"load_async":true}`)},
	)
	require.NoError(t, err, "the engine's class, with the engine's own settings")
	assert.Equal(t, "mooncake-store", c.Traits().Name)
	assert.Equal(t, connector.PrefillThenDecode, c.Traits().Order)
	assert.True(t, c.Traits().Handoff.ContentStore)
	assert.Zero(t, c.Traits().Handoff.Lease, "nothing is known of the KV's life")
}

// The settle time passes between the legs and no longer; the wait also ends with the request.
func TestSettleTime(t *testing.T) {
	wait, done := newConnector(t, nil).Expect(nil)
	assert.Nil(t, wait, "none by default")
	done(nil)
	wait, done = newConnector(t, &mooncakestore.Options{SettleTime: config.Duration(20 * time.Millisecond)}).Expect(nil)
	defer done(nil)
	begun := time.Now()
	_, err := wait(t.Context())
	require.NoError(t, err)
	assert.GreaterOrEqual(t, time.Since(begun), 20*time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wait, done = newConnector(t, &mooncakestore.Options{SettleTime: config.Duration(time.Hour)}).Expect(nil)
	defer done(nil)
	_, err = wait(ctx)
	require.ErrorIs(t, err, context.Canceled)
}
