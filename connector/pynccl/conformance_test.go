// SPDX-License-Identifier: Apache-2.0

package pynccl_test

import (
	"encoding/json"
	"testing"

	"github.com/pdkit/pdkit/connector/connectortest"
)

var harness = connectortest.Harness{
	Name: "pynccl",
	Config: json.RawMessage(`{"kv_buffer_size":"2e9","kv_port":"15000","kv_ip":"10.0.1.2","kv_rank":0,` +
		`"kv_parallel_size":2,"kv_buffer_device":"cpu"}`),
	BadConfig: []json.RawMessage{json.RawMessage(`{"kv_port":0}`), json.RawMessage(`{"kv_parallel_size":4}`)},
	Except:    connectortest.Exceptions{NotByID: true}, // D asks P for the prompt's tokens
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open("pynccl"), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
