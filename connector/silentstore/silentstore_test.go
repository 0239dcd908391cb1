// SPDX-License-Identifier: Apache-2.0

package silentstore_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/silentstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var names = []string{"ascend-store", "flexkv", "hf3fs", "ucm"}

func harness(name string) connectortest.Harness {
	return connectortest.Harness{
		Name:   name,
		Config: json.RawMessage(`{"settleTime":"30s","kv_connector_extra_config":{"a":"b"}}`),
		BadConfig: []json.RawMessage{json.RawMessage(`{"settleTime":"-1s"}`),
			json.RawMessage(`{"kv_connector":"NixlConnector"}`), json.RawMessage(`{"backend":"mooncake"}`)},
	}
}

func TestConformance(t *testing.T) {
	for _, name := range names {
		t.Run(name, func(t *testing.T) { connectortest.Run(t, harness(name)) })
	}
}

func TestGolden(t *testing.T) {
	for _, name := range names {
		connectortest.Golden(t, connectortest.Open(name), "testdata/"+name)
	}
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness("ascend-store")) }

func TestUnknownStores(t *testing.T) {
	_, err := silentstore.New("other", nil)
	require.ErrorContains(t, err, "flexkv")
}
