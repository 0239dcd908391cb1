// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"encoding/json"
	"testing"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/offload"
	"github.com/pdkit/pdkit/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(offload.Name), "testdata/golden")
}

func harness(dispatch string) connectortest.Harness {
	return connectortest.Harness{
		Name: offload.Name,
		Config: json.RawMessage(`{"dispatch":"` + dispatch +
			`","port":6000,"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":1073741824,"blocks_per_chunk":2,` +
			`"eviction_policy":"arc",` +
			`"cache_policy_module_path":"m","offload_prompt_only":false,"self_describing_kv_events":true,` +
			`"secondary_tiers":[{"type":"p2p","num_threads":8},{"type":"fs","root_dir":"/kv"}]}`),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"dispatch":"both"}`), json.RawMessage(`{"port":70000}`),
			json.RawMessage(`{"spec_name":"CPUOffloadingSpec"}`), json.RawMessage(`{"cpu_bytes_to_use":-1}`),
			json.RawMessage(`{"block_size":16,"blocks_per_chunk":2}`),
			json.RawMessage(`{"secondary_tiers":[{"type":"fs"}]}`), json.RawMessage(`{"secondary_tiers":[]}`),
			json.RawMessage(`{"secondary_tiers":[{"type":"p2p","port":"x"}]}`),
			json.RawMessage(`{"secondary_tiers":[{"type":"p2p","port":1.5}]}`),
		},
		Prefill: discovery.Endpoint{
			Attributes: map[string]string{"p2pHost": "planted-prefill.example", "p2pPort": "7780"},
		},
	}
}

func TestConformance(t *testing.T) {
	for _, dispatch := range []string{"together", "serial"} {
		t.Run(dispatch, func(t *testing.T) { connectortest.Run(t, harness(dispatch)) })
	}
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness("together")) }
