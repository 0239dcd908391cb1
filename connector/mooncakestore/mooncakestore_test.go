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
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/connector/mooncakestore"
	"github.com/pdkit/pdkit/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(settings json.RawMessage) (connector.KVConnector, error) {
	return connector.Open(config.Spec{Type: mooncakestore.Name, Config: settings})
}

func newConnector(t testing.TB, o *mooncakestore.Options) *mooncakestore.Connector {
	t.Helper()
	c, err := mooncakestore.New(o)
	require.NoError(t, err)
	return c
}

func TestGolden(t *testing.T) { connectortest.Golden(t, open, "testdata/golden") }

func harness() connectortest.Harness {
	return connectortest.Harness{
		Name: mooncakestore.Name,
		New:  open,
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

func endpoint(t testing.TB, url string, role discovery.Role) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New(url, role)
	require.NoError(t, err)
	return e
}

func render(t *testing.T, o *mooncakestore.Options, target launch.Target) launch.Settings {
	t.Helper()
	s, err := newConnector(t, o).Render(target)
	require.NoError(t, err)
	return s
}

func TestRenderDefaults(t *testing.T) {
	p, d := endpoint(t, "http://10.0.0.1:8100", discovery.RolePrefill),
		endpoint(t, "http://10.0.0.2:8200", discovery.RoleDecode)
	s := render(t, nil, launch.Target{Endpoint: p, Engines: []discovery.Endpoint{p, d}})
	assert.JSONEq(t, `{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both"}`, s.KVTransfer.JSON(),
		"P finds what it has computed before")
	assert.Equal(
		t, []launch.EnvVar{{Name: "PYTHONHASHSEED", Value: "0"},
			{Name: "MOONCAKE_CONFIG_PATH", Value: "mooncake.json"}}, s.Env,
	)
	require.Len(t, s.Files, 1)
	assert.JSONEq(t, `{"metadata_server":"P2PHANDSHAKE","master_server_address":"127.0.0.1:50051","protocol":"rdma",`+
		`"device_name":""}`, s.Files[0].Content)
	assert.Equal(
		t, []launch.Companion{{Name: "mooncake-master", Command: []string{"mooncake_master", "--port", "50051"}}},
		s.Companions,
	)
	require.Len(t, s.Notes, 1)
	assert.Equal(t, "config.master_server_address", s.Notes[0].Path, "a master on loopback serves one host only")

	assert.Equal(t, "kv_consumer", render(t, nil, launch.Target{Endpoint: d}).KVTransfer.Role)
	assert.Empty(t, render(t, nil, launch.Target{Endpoint: d, Engines: []discovery.Endpoint{d}}).Notes)
	assert.Contains(t, render(t, nil, launch.Target{Endpoint: d, CPU: true}).Files[0].Content, `"protocol": "tcp"`)
}

func TestRenderSettings(t *testing.T) {
	no := false
	s := render(t, &mooncakestore.Options{
		MetadataServer: "http://m:8081/metadata", MasterServerAddress: "m:50052", Protocol: "tcp", DeviceName: "mlx5_0",
		GlobalSegmentSize: "80GB", LocalBufferSize: "1073741824",
		EnableOffload: true, TenantID: "a", LocalHostname: "h", PreferredSegment: "o:1", LoadAsync: &no,
		CachePrefix: "p", PrefillTPSizes: []int{4, 2},
	}, launch.Target{Endpoint: endpoint(t, "http://h:1", discovery.RolePrefill)})
	assert.JSONEq(
		t, `{"metadata_server":"http://m:8081/metadata","master_server_address":"m:50052","protocol":"tcp",
		"device_name":"mlx5_0","global_segment_size":"80GB",
		"local_buffer_size":1073741824,"enable_offload":true,"tenant_id":"a"}`, s.Files[0].Content)
	assert.Equal(t, map[string]any{"load_async": &no, "cache_prefix": "p", "prefill_tp_sizes": []int{4, 2}},
		s.KVTransfer.Extra)
	assert.Equal(
		t, []string{"mooncake_master", "--port", "50052", "--enable_http_metadata_server=true",
			"--http_metadata_server_port=8081", "--enable_offload=true", "--enable_multi_tenants=true"},
		s.Companions[0].Command)
	assert.Subset(
		t, s.Env, []launch.EnvVar{{Name: "MOONCAKE_REQUESTER_LOCAL_HOSTNAME", Value: "h"},
			{Name: "MOONCAKE_PREFERRED_SEGMENT", Value: "o:1"}},
	)
}

func TestRenderResources(t *testing.T) {
	r := config.Resources{MaxMemory: "8Gi", MaxDisk: "1Ti", MaxBandwidth: "1G"}
	target := launch.Target{Endpoint: endpoint(t, "http://h:1", discovery.RolePrefill), Resources: r}
	s := render(t, nil, target)
	assert.Contains(t, s.Files[0].Content, `"global_segment_size": 8589934592`)
	assert.Equal(
		t, map[string]bool{"resources.maxMemory": false, "resources.maxDisk": true, "resources.maxBandwidth": true},
		effects(s),
	)
	s = render(t, &mooncakestore.Options{GlobalSegmentSize: "1GB"}, target)
	assert.Contains(t, s.Files[0].Content, `"global_segment_size": "1GB"`)
	assert.True(t, effects(s)["resources.maxMemory"], "the engine's own setting wins")
	s = render(t, &mooncakestore.Options{Mode: "standalone-store"}, target)
	assert.Contains(t, s.Files[0].Content, `"global_segment_size": 0`, "the engines give nothing")
	assert.True(t, effects(s)["resources.maxMemory"])
	_, err := newConnector(
		t, nil,
	).Render(launch.Target{Endpoint: target.Endpoint, Resources: config.Resources{MaxMemory: "0"}})
	require.ErrorContains(t, err, "resources.maxMemory")
}

// effects maps the paths of notes to whether the note says that the setting has no effect.
func effects(s launch.Settings) map[string]bool {
	m := map[string]bool{}
	for _, n := range s.Notes {
		if n.Path != "config.mode" {
			m[n.Path] = n.NoEffect
		}
	}
	return m
}
