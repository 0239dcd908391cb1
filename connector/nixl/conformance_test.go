// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"encoding/json"
	"testing"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/nixl"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// everySetting sets every setting to a value that is not its default. It leaves out those of bidirectional, which has a
// harness of its own, and protocol, which means the same as networkType.
const everySetting = `{"leaseDuration":"45s",
	"clusterEndpoints":["10.0.0.9:2379"],"clusterId":"c","nodeId":"n","networkInterface":"ib0","networkType":"rdma",
	"port":7000,
	"rdmaConfig":{"deviceName":"mlx5_0","port":2,"queueDepth":128,"maxSge":4,"mtu":4096},
	"infinibandConfig":{"hcaName":"mlx5_1","port":2,"partitionKey":"0x8001","serviceLevel":3},
	"bufferSize":1048576,"connectionPoolSize":4,"maxConnections":5,"maxConcurrency":6,"keepAliveInterval":"7s",
	"maxMemoryPerNode":1073741824,
	"replicationFactor":2,"consistencyLevel":"strong","shardingStrategy":"hash","hashFunction":"crc32","batchSize":9,
	"flushInterval":"11ms",
	"compressionType":"lz4","connectionTimeout":"3s","readTimeout":"4s","writeTimeout":"5s","failoverTimeout":"6s",
	"retryPolicy":"exponential"}`

var harness = connectortest.Harness{
	Name:   nixl.Name,
	Config: json.RawMessage(everySetting),
	Response: func(s *connector.Session, _ []byte) connectortest.Response {
		return connectortest.Response{Handoff: `{"do_remote_prefill":true,"do_remote_decode":false,` +
			`"remote_block_ids":[[1,2],[3]],` +
			`"remote_engine_id":"e-1","remote_request_id":"cmpl-` + s.ID +
			`","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,` +
			`"remote_num_tokens":33,"remote_prefill_cached_tokens":0,"remote_blocks_expiry_time":1234.5}`}
	},
	Needs: []string{"do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host",
		"remote_port"},
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

// The golden exchanges are real ones of vLLM 0.32.0, with P's responses byte for byte, and handoffs that a real D was
// given (docs/protocols/nixl.md §3). Handoffs whose form makes D die, hang or fail must not reach it. Handoffs that D
// accepts must, also those whose fault only the engines can see. The recording scripts left "stream" out where false is
// the default.
func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(nixl.Name), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
