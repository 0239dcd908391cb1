// SPDX-License-Identifier: Apache-2.0

package plainhttp_test

import (
	"encoding/json"
	"testing"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

var harness = connectortest.Harness{
	Name:   plainhttp.Name,
	Config: json.RawMessage(`{"requestTimeout":"7s","maxRetries":3,"kvTransferMethod":"implicit"}`),
	BadConfig: []json.RawMessage{
		json.RawMessage(`{"kvTransferMethod":"explicit"}`), json.RawMessage(`{"maxRetries":-1}`),
		json.RawMessage(`{"requestTimeout":"-1s"}`),
	},
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
