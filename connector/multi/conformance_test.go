// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"encoding/json"
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	_ "github.com/pdkit/pdkit/connector/mooncakeascend"
	_ "github.com/pdkit/pdkit/connector/silentstore"
)

var harness = connectortest.Harness{
	Name:   "multi",
	Config: json.RawMessage(nixlAndStore),
	Response: func(s *connector.Session, _ []byte) connectortest.Response {
		return connectortest.Response{Handoff: `{"do_remote_prefill":true,"remote_block_ids":[[1,2]],` +
			`"remote_engine_id":"e-1",` +
			`"remote_request_id":"cmpl-` + s.ID + `","remote_host":"10.0.0.1","remote_port":5600}`}
	},
	Needs:  []string{"remote_block_ids", "remote_port"},
	Except: connectortest.Exceptions{NeedsConfig: true}, // without children there is nothing
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestConformanceOfKVBM(t *testing.T) {
	h := harness
	h.Name = "kvbm"
	h.Config = json.RawMessage(`{"connectors":[{"type":"flexkv"},{"type":"nixl","config":{"leaseDuration":"60s"}}]}`)
	h.BadConfig = []json.RawMessage{json.RawMessage(`{"connectors":[{"type":"nixl"}]}`),
		json.RawMessage(`{"connectors":[{"type":"nixl"},{"kv_connector":"DynamoConnector"}]}`),
		json.RawMessage(`{"connectors":[{"type":"sharedstorage"},{"type":"nixl"}]}`)}
	h.Except.NeedsConfig = false
	connectortest.Run(t, h)
}

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open("multi"), "testdata/golden")
	connectortest.Golden(t, connectortest.Open("kvbm"), "testdata/kvbm")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
