// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/discovery"
)

func TestTheEncodeStage(t *testing.T) {
	rendered := func(o epd.Options, target launch.Target) (launch.Settings, error) {
		stage, err := epd.Wrap(open(t, "nixl", ``).KVConnector, &o)
		require.NoError(t, err)
		return launch.Render(stage, nil, target)
	}
	render := func(o epd.Options, target launch.Target) launch.Settings {
		s, err := rendered(o, target)
		require.NoError(t, err)
		return s
	}
	e := engine(t, "http://10.0.0.5:8300", discovery.RoleEncode)
	s := render(epd.Options{Type: epd.Example, SharedStoragePath: "/ec"}, launch.Target{Endpoint: e})
	assert.Equal(
		t, []string{"--ec-transfer-config", `{"ec_connector":"ECExampleConnector","ec_role":"ec_producer",` +
			`"ec_connector_extra_config":{"shared_storage_path":"/ec"}}`}, s.Args,
	)
	assert.Nil(t, s.KVTransfer, "an encode engine has no KV to give")
	s = render(epd.Options{Type: epd.NIXL}, launch.Target{Endpoint: e, Index: 1})
	assert.Equal(
		t, []string{"--ec-transfer-config", `{"ec_connector":"ECCPUConnector","ec_role":"ec_producer",` +
			`"ec_connector_extra_config":{"ec_cpu_bytes":1073741824,"ec_enable_nixl":true}}`}, s.Args,
	)
	assert.Contains(t, s.Env, launch.EnvVar{Name: "VLLM_EC_SIDE_CHANNEL_HOST", Value: "10.0.0.5"})
	assert.Contains(t, s.Env, launch.EnvVar{Name: "VLLM_EC_SIDE_CHANNEL_PORT", Value: "5602"})
	p := engine(t, "http://10.0.0.6:8100", discovery.RolePrefill)
	s = render(epd.Options{Type: epd.Example, SharedStoragePath: "/ec"},
		launch.Target{Endpoint: p, Engines: []discovery.Endpoint{p}})
	require.NotNil(t, s.KVTransfer)
	assert.Equal(t, "NixlConnector", s.KVTransfer.Connector, "the inner connector's settings stay")
	assert.Contains(t, strings.Join(s.Args, " "), `"ec_role":"ec_consumer"`)
	d := engine(t, "http://10.0.0.7:8200", discovery.RoleDecode)
	s = render(epd.Options{Type: epd.Example}, launch.Target{Endpoint: d, Engines: []discovery.Endpoint{d}})
	assert.NotContains(t, strings.Join(s.Args, " "), "ec-transfer-config", "D takes no embeddings")
	_, err := rendered(epd.Options{Type: epd.NIXL}, launch.Target{Endpoint: e, Version: launch.Version{Minor: 29}})
	assert.ErrorContains(t, err, "0.30")
}
