// SPDX-License-Identifier: Apache-2.0

package mooncakeascend_test

import (
	"encoding/json"
	"testing"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/mooncakeascend"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// hybridHandoff has the keys that MooncakeHybridConnector writes, in its order: one group keeps no block.
const hybridHandoff = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7,8,9],[]],` +
	`"remote_engine_id":"e3e6","remote_request_id":"cmpl-r-0-1a2b3c4d","remote_host":"10.0.0.5","remote_port":30000,` +
	`"remote_ptp_size":8,"last_token_id":1234,"remote_multi_nodes_meta_mapping":{},"num_prompt_blocks":3}`

func harness() connectortest.Harness {
	return connectortest.Harness{
		Name:   mooncakeascend.Name,
		Config: json.RawMessage(`{"leaseDuration":"90s","kvPort":36000}`),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"leaseDuration":"0s"}`), json.RawMessage(`{"leaseDuration":"1500ms"}`),
			json.RawMessage(`{"kvPort":65536}`), json.RawMessage(`{"kvPort":-1}`),
		},
		Response: func(*connector.Session, []byte) connectortest.Response {
			return connectortest.Response{Handoff: good}
		},
		Needs: []string{
			"do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_host", "remote_port",
			"remote_block_ids", "num_prompt_blocks",
		},
	}
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness()) }

func TestConformanceOfHybrid(t *testing.T) {
	h := harness()
	h.Name = mooncakeascend.HybridName
	h.Response = func(*connector.Session, []byte) connectortest.Response {
		return connectortest.Response{Handoff: hybridHandoff}
	}
	connectortest.Run(t, h)
}

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(mooncakeascend.Name), "testdata/golden")
	connectortest.Golden(t, connectortest.Open(mooncakeascend.HybridName), "testdata/mooncake-hybrid")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness()) }
