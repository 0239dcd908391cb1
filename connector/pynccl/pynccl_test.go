// SPDX-License-Identifier: Apache-2.0

package pynccl_test

import (
	"encoding/json"
	"testing"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/pynccl"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var harness = connectortest.Harness{
	Name: pynccl.Name,
	Config: json.RawMessage(`{"kv_buffer_size":"2e9","kv_port":"15000","kv_ip":"10.0.1.2","kv_rank":0,` +
		`"kv_parallel_size":2,"kv_buffer_device":"cpu"}`),
	Except: connectortest.Exceptions{NotByID: true}, // D asks P for the prompt's tokens
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(pynccl.Name), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }

func TestSettings(t *testing.T) {
	play.Open(t, "PyNcclConnector", `{"kv_buffer_size":"1e9","kv_buffer_device":"cuda"}`)
	play.Refuses(t, pynccl.Name, map[string]string{
		`{"kv_parallel_size":3}`: "kv_parallel_size", `{"kv_rank":2}`: "kv_rank", `{"kv_port":65533}`: "kv_port",
		`{"kv_port":0}`: "kv_port", `{"kv_port":1.5}`: "kv_port", `{"kv_parallel_size":4}`: "kv_parallel_size",
		`{"kv_buffer_size":0}`: "kv_buffer_size", `{"kv_buffer_device":"gpu"}`: "kv_buffer_device",
		`{"kv_rnk":0}`: "kv_rnk … did you mean kv_rank",
	})
}
