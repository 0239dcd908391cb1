// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	_ "github.com/pdkit/pdkit/connector/lmcache"
	_ "github.com/pdkit/pdkit/connector/mooncake"
)

func TestTransfersPartEnginesAndStoresBesideThemDoNot(t *testing.T) {
	for name, c := range map[string]struct {
		children, attribute string
		p, d                string
		meet                bool
	}{
		"as the transfer allows":         {`{"type":"nixl"},{"type":"lmcache"}`, "tpSize", "2", "4", true},
		"as the transfer forbids":        {`{"type":"nixl"},{"type":"lmcache"}`, "tpSize", "2", "3", false},
		"a store of each engine's own":   {`{"type":"nixl"},{"type":"lmcache"}`, "store", "a", "b", true},
		"the same, with the store first": {`{"type":"lmcache"},{"type":"nixl"}`, "store", "a", "b", true},
		"two transfers, one allows": {`{"type":"nixl"},{"type":"mooncake"}`, "blockSize", "16", "32",
			false},
		"two transfers, both allow": {`{"type":"nixl"},{"type":"mooncake"}`, "blockSize", "16", "16",
			true},
		"stores alone, one in common": {`{"type":"sharedstorage"},{"type":"lmcache"}`, "store",
			"nfs-1,redis", "nfs-2,redis", true},
		"stores alone, none in common": {`{"type":"sharedstorage"},{"type":"lmcache"}`, "store", "nfs-1",
			"nfs-2", false},
		"stores alone, one of which has no rule": {`{"type":"sharedstorage"},{"type":"lmcache"}`, "kvCacheDtype",
			"fp8", "auto", true},
		"a store, and one that nothing is told of": {
			`{"type":"sharedstorage"},{"kv_connector":"SimpleCPUOffloadConnector"}`,
			"store", "nfs-1", "nfs-2", true},
	} {
		t.Run(name, func(t *testing.T) {
			meet := true
			for _, r := range open(t, `{"connectors":[`+c.children+`]}`).Traits().PairRules {
				meet = meet && (r.Attribute != c.attribute || r.Compatible(c.p, c.d))
			}
			assert.Equal(t, c.meet, meet)
		})
	}
}
