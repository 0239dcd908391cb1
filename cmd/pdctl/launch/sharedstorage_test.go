// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

func TestSharedStorage(t *testing.T) {
	for version, want := range map[string]string{
		"": `{"kv_connector":"ExampleConnector","kv_role":"kv_both",` +
			`"kv_connector_extra_config":{"shared_storage_path":"/kv"}}`,
		"0.32.0": `{"kv_connector":"ExampleConnector","kv_role":"kv_both",` +
			`"kv_connector_extra_config":{"shared_storage_path":"/kv"}}`,
		"0.13.0": `{"kv_connector":"ExampleConnector","kv_role":"kv_both",` +
			`"kv_connector_extra_config":{"shared_storage_path":"/kv"}}`,
		"0.12.0": `{"kv_connector":"SharedStorageConnector","kv_role":"kv_both",` +
			`"kv_connector_extra_config":{"shared_storage_path":"/kv"}}`,
	} {
		v, err := launch.ParseVersion(version)
		require.NoError(t, err)
		for _, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode} {
			s := render(t, "sharedstorage", `{"sharedStoragePath":"/kv"}`,
				launch.Target{Version: v, Endpoint: discovery.Endpoint{Role: role}})
			assert.Equal(t, want, s.KVTransfer.JSON(), version)
			assert.Equal(t, "vllm", s.Engine)
		}
	}
	s := render(t, "sharedstorage", `{"cacheHitThreshold":0.5}`,
		launch.Target{Resources: config.Resources{MaxDisk: "1Gi"}})
	var notes []string
	for _, n := range s.Notes {
		notes = append(notes, n.Path)
	}
	assert.Equal(t, []string{"config.sharedStoragePath", "config.cacheHitThreshold", "resources.maxDisk"}, notes,
		"no setting is dropped in silence")
	assert.True(t, s.Notes[2].NoEffect)
	_, err := open(t, "sharedstorage", ``).Render(launch.Target{Version: launch.Version{Minor: 7}})
	assert.ErrorContains(t, err, "older")
}
