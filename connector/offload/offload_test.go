// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/offload"
	"github.com/pdkit/pdkit/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newConnector(t testing.TB, o *offload.Options) *offload.Connector {
	t.Helper()
	c, err := offload.New(o)
	require.NoError(t, err)
	return c
}

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(offload.Name), "testdata/golden")
}

func harness(dispatch string) connectortest.Harness {
	return connectortest.Harness{
		Name: offload.Name,
		Config: json.RawMessage(`{"dispatch":"` + dispatch +
			`","port":6000,"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":1073741824,"blocks_per_chunk":2,` +
			`"eviction_policy":"arc",` +
			`"cache_policy_module_path":"m","offload_prompt_only":false,"self_describing_kv_events":true,` +
			`"secondary_tiers":[{"type":"p2p","num_threads":8},{"type":"fs","root_dir":"/kv"}]}`),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"dispatch":"both"}`), json.RawMessage(`{"port":70000}`),
			json.RawMessage(`{"spec_name":"CPUOffloadingSpec"}`), json.RawMessage(`{"cpu_bytes_to_use":-1}`),
			json.RawMessage(`{"block_size":16,"blocks_per_chunk":2}`),
			json.RawMessage(`{"secondary_tiers":[{"type":"fs"}]}`), json.RawMessage(`{"secondary_tiers":[]}`),
			json.RawMessage(`{"secondary_tiers":[{"type":"p2p","port":"x"}]}`),
			json.RawMessage(`{"secondary_tiers":[{"type":"p2p","port":1.5}]}`),
		},
		Prefill: discovery.Endpoint{
			Attributes: map[string]string{"p2pHost": "planted-prefill.example", "p2pPort": "7780"},
		},
	}
}

func TestConformance(t *testing.T) {
	for _, dispatch := range []string{"together", "serial"} {
		t.Run(dispatch, func(t *testing.T) { connectortest.Run(t, harness(dispatch)) })
	}
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness("together")) }

func TestOrders(t *testing.T) {
	for settings, want := range map[string][]connector.Order{
		`{}`:                      {connector.Together, connector.PrefillThenDecode},
		`{"dispatch":"together"}`: {connector.Together, connector.PrefillThenDecode},
		`{"dispatch":"serial"}`:   {connector.PrefillThenDecode, connector.Together},
	} {
		c, err := connector.Open(config.Spec{Type: "OffloadingConnector", Config: json.RawMessage(settings)})
		require.NoError(t, err)
		assert.Equal(t, want, append([]connector.Order{c.Traits().Order}, c.Traits().OtherOrders...), settings)
		assert.False(t, c.Traits().Ending.Orphans, "D waits 30 s at most and blocks nothing")
	}
}

func endpoint(t testing.TB, url string, role discovery.Role, attributes ...string) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New(url, role)
	require.NoError(t, err)
	e.Attributes = map[string]string{}
	for i := 0; i+1 < len(attributes); i += 2 {
		e.Attributes[attributes[i]] = attributes[i+1]
	}
	return e
}

func TestCheckEndpoint(t *testing.T) {
	c := newConnector(t, nil)
	require.NoError(t, c.CheckEndpoint(endpoint(t, "http://h:1", discovery.RolePrefill)), "host and port have defaults")
	require.NoError(t, c.CheckEndpoint(endpoint(t, "http://h:1", discovery.RoleDecode, "p2pPort", "x")),
		"nobody asks D")
	for want, attributes := range map[string][]string{
		"attributes.p2pPort: leaves": {"p2pPort", "65535", "dpSize", "2"},
		"attributes.p2pPort: is not": {"p2pPort", "x"},
		"attributes.dpSize":          {"dpSize", "0"},
		"attributes.p2pHost":         {"p2pHost", "http://h"},
	} {
		require.ErrorContains(t, c.CheckEndpoint(endpoint(t, "http://h:1", discovery.RolePrefill, attributes...)), want)
	}
}
