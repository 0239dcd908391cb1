// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	_ "github.com/pdkit/pdkit/connector/all" // all connectors

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/names"
)

// A configuration may name a connector by its name or by the engines' class name; both give the same connector.
func TestNamesAndClassesMeanTheirProtocol(t *testing.T) {
	for typ, want := range map[string]string{
		"": "http", "http": "http", "nixl": "nixl", "nixl-push": "nixl-push",
		"lmcache": "lmcache", "lmcache-pd": "lmcache-pd", "mooncake": "mooncake",
		"mooncake-store": "mooncake-store", "mooncake-ascend": "mooncake-ascend",
		"ascend-layerwise": "ascend-layerwise", "sharedstorage": "sharedstorage",
		"pynccl": "pynccl", "p2pnccl": "p2pnccl", "moriio": "moriio", "offload-p2p": "offload-p2p",
		"multi": "multi", "sglang": "sglang", "trtllm": "trtllm",
		"NixlConnector": "nixl", "NixlPullConnector": "nixl", "NixlPushConnector": "nixl-push",
		"LMCacheConnectorV1": "lmcache", "LMCacheMPConnector": "lmcache",
		"MooncakeConnector": "mooncake", "MooncakeStoreConnector": "mooncake-store",
		"MooncakeConnectorV1":        "mooncake-ascend",
		"MooncakeLayerwiseConnector": "ascend-layerwise", "ExampleConnector": "sharedstorage",
		"SharedStorageConnector": "sharedstorage",
		"PyNcclConnector":        "pynccl", "P2pNcclConnector": "p2pnccl",
		"MoRIIOConnector": "moriio", "OffloadingConnector": "offload-p2p",
		"MultiConnector": "multi", "relay": "relay", "tpu": "tpu", "TPUConnector": "tpu", "kvbm": "kvbm",
		"PdConnector": "kvbm", "mooncake-hybrid": "mooncake-hybrid", "MooncakeHybridConnector": "mooncake-hybrid",
		"AscendStoreConnector": "ascend-store", "MooncakeConnectorStoreV1": "ascend-store",
		"FlexKVConnectorV1": "flexkv", "HF3FSKVConnector": "hf3fs", "UCMConnector": "ucm",
		"LMCacheAscendConnector": "lmcache", "LMCacheConnectorV1Dynamic": "lmcache",
	} {
		t.Run(typ, func(t *testing.T) {
			assert.Equal(t, want, play.Open(t, typ, needed[want]).Traits().Name)
			assert.Equal(t, want, names.Resolve(typ, nil))
		})
	}
}

func TestLMCachesClassMeansOneOfTwoByItsConfiguration(t *testing.T) {
	for _, config := range []string{`{"enable_pd":true}`, `{"lmcache.enable_pd":true}`, `{"enable_nixl":true}`} {
		assert.Equal(t, "lmcache-pd", names.Resolve("LMCacheConnectorV1", json.RawMessage(config)), config)
	}
	assert.Equal(t, "lmcache", names.Resolve("LMCacheConnectorV1", json.RawMessage(`{"enable_pd":false}`)))
}

func TestAnUnknownNameGetsTheNearestOneOrAll(t *testing.T) {
	_, err := connector.Open(config.Spec{Type: "NixlConector"})
	require.ErrorIs(t, err, names.ErrUnknown)
	assert.True(t, strings.HasSuffix(err.Error(), "did you mean NixlConnector?"), err)
	_, err = connector.Open(config.Spec{Type: "quantum"})
	for _, part := range []string{"sharedstorage", "p2pnccl", "multi", "nixl"} {
		assert.ErrorContains(t, err, part)
	}
}
