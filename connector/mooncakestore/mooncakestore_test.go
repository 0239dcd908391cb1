// SPDX-License-Identifier: Apache-2.0

package mooncakestore_test

import (
	"encoding/json"
	"testing"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/mooncakestore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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
