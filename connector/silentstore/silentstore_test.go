// SPDX-License-Identifier: Apache-2.0

package silentstore_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/silentstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var names = []string{"ascend-store", "flexkv", "hf3fs", "ucm"}

func factory(name string) func(json.RawMessage) (connector.KVConnector, error) {
	return connectortest.Open(name)
}

func open(t testing.TB, typ, settings string) *silentstore.Connector {
	t.Helper()
	c, err := factory(typ)(json.RawMessage(settings))
	require.NoError(t, err)
	return c.(*silentstore.Connector)
}

func harness(name string) connectortest.Harness {
	return connectortest.Harness{
		Name: name, New: factory(name),
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
		connectortest.Golden(t, factory(name), "testdata/"+name)
	}
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness("ascend-store")) }

func TestClassesMeanTheirStore(t *testing.T) {
	for class, name := range map[string]string{"AscendStoreConnector": "ascend-store",
		"MooncakeConnectorStoreV1": "ascend-store", "FlexKVConnectorV1": "flexkv", "HF3FSKVConnector": "hf3fs",
		"UCMConnector": "ucm"} {
		assert.Equal(t, name, open(t, class, ``).Traits().Name)
	}
	_, err := silentstore.New("other", nil)
	require.ErrorContains(t, err, "flexkv")
	c, err := silentstore.New("ucm", nil)
	require.NoError(t, err)
	assert.Equal(t, "ucm", c.Traits().Name)
}

func TestTheSettleTimeIsWaitedBetweenTheLegs(t *testing.T) {
	wait, done := open(t, "hf3fs", ``).Expect(nil)
	assert.Nil(t, wait)
	done(nil)
	wait, done = open(t, "hf3fs", `{"settleTime":"1h"}`).Expect(nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	_, err := wait(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	done(nil)
}
