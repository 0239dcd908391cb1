// SPDX-License-Identifier: Apache-2.0

package p2pnccl_test

import (
	"encoding/json"
	"testing"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/discovery"
)

var harness = connectortest.Harness{
	Name: "p2pnccl",
	Config: json.RawMessage(`{"kv_buffer_size":"8e9","kv_port":"21001","kv_ip":"10.0.1.2","proxy_ip":"10.0.1.1",` +
		`"proxy_port":"30009","http_port":"20001","send_type":"PUT","mem_pool_size_gb":8,"nccl_num_channels":16,` +
		`"send_wait_timeout":9,"recv_store_timeout":9}`),
	BadConfig: []json.RawMessage{json.RawMessage(`{"kv_port":0}`), json.RawMessage(`{"send_type":"push"}`)},
	Prefill:   discovery.Endpoint{Attributes: map[string]string{"zmqAddress": "10.0.1.2:21001"}},
	Decode:    discovery.Endpoint{Attributes: map[string]string{"zmqAddress": "10.0.1.3:22001"}},
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open("p2pnccl"), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
