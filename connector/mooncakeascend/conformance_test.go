// SPDX-License-Identifier: Apache-2.0

package mooncakeascend_test

import (
	"encoding/json"
	"testing"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/connector/mooncakeascend"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func factory(settings json.RawMessage) (connector.KVConnector, error) {
	return connector.Open(config.Spec{Type: mooncakeascend.Name, Config: settings})
}

func harness() connectortest.Harness {
	return connectortest.Harness{
		Name:   mooncakeascend.Name,
		New:    factory,
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
		Versions: []launch.Version{{Major: 0, Minor: 10, Patch: 1}, {Major: 0, Minor: 23}},
	}
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness()) }

func TestGolden(t *testing.T) { connectortest.Golden(t, factory, "testdata/golden") }

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness()) }
