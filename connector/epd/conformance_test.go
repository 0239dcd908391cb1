// SPDX-License-Identifier: Apache-2.0

package epd_test

import (
	"encoding/json"
	"testing"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/nixl"
)

// factory puts the stage before nixl. The harness gives the settings of nixl.
func factory(settings json.RawMessage) (connector.KVConnector, error) {
	inner, err := connector.Open(config.Spec{Type: "nixl", Config: settings})
	if err != nil {
		return nil, err
	}
	return epd.Wrap(inner, &epd.Options{Type: epd.NIXL})
}

var harness = connectortest.Harness{
	Name:      nixl.Name,
	New:       factory,
	Config:    json.RawMessage(`{"leaseDuration":"45s"}`),
	BadConfig: []json.RawMessage{json.RawMessage(`{"leaseDuration":"0s"}`)},
	Response: func(s *connector.Session, _ []byte) connectortest.Response {
		return connectortest.Response{Handoff: `{"do_remote_prefill":true,"remote_block_ids":[[1,2]],` +
			`"remote_engine_id":"e-1",` +
			`"remote_request_id":"cmpl-` + s.ID + `","remote_host":"10.0.0.1","remote_port":5600}`}
	},
	Needs: []string{"remote_block_ids"},
	Encoded: func(_ *connector.Session, i connector.Item) json.RawMessage {
		return json.RawMessage(`{"id":"x","ec_transfer_params":{"` + i.ID +
			`":{"metadata":{},"peer_host":"10.0.0.5","peer_port":5601,"size_bytes":64}}}`)
	},
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestGolden(t *testing.T) { connectortest.Golden(t, factory, "testdata/golden") }

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
