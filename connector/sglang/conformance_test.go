// SPDX-License-Identifier: Apache-2.0

package sglang_test

import (
	"encoding/json"
	"testing"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/discovery"
)

var harness = connectortest.Harness{
	Name:    "sglang",
	Config:  json.RawMessage(`{"bootstrapPort":9000,"prefillCap":true,"transferBackend":"nixl"}`),
	Prefill: discovery.Endpoint{Attributes: map[string]string{"bootstrapPort": "9001", "dpSize": "4"}},
	Except: connectortest.Exceptions{
		KeepsLimit:    true, // /v1/responses: SGLang takes two tokens off it, so P gets three
		KeepsLogprobs: true, // P samples the first token, and gives D its log probability only if it was asked for
	},
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open("sglang"), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
