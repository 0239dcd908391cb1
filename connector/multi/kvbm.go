// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"encoding/json"
	"slices"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
)

// KVBMName is the name that Dynamo KVBM's connector is registered under.
const KVBMName = "kvbm"

const (
	kvbmModule = "kvbm.vllm_integration.connector"
	kvbmTier   = "DynamoConnector"
)

func init() {
	connector.Register(KVBMName, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return NewKVBM(&o)
	}, "PdConnector")
}

// NewKVBM makes the connector "kvbm": PdConnector of Dynamo's KVBM, a MultiConnector of a tier of P's own memory and
// NIXL. nil, or no connectors, means DynamoConnector and nixl. On the wire it is NIXL's pull.
//
// Only P runs PdConnector: it asks its first child alone which KV can be loaded, so a D with it would never load P's.
// D runs NixlConnector.
//
// Facts: kvbm 1.6.1, kvbm/vllm_integration/connector/pd_connector.py. Read, not run.
func NewKVBM(o *Options) (*Connector, error) {
	list := Options{}
	if o != nil {
		list = *o
	}
	if len(list.Connectors) == 0 {
		list.Connectors = []json.RawMessage{[]byte(`{"kv_connector":"` + kvbmTier + `","kv_role":"kv_both"}`),
			[]byte(`{"type":"nixl"}`)}
	}
	c, err := New(&list)
	if err != nil {
		return nil, err
	}
	if len(c.children) != 2 || !slices.Contains([]string{kvbmTier, "lmcache", "flexkv"}, c.children[0].traits.Name) ||
		c.children[1].traits.Name != "nixl" {
		return nil, &config.FieldError{Path: "connectors", Problem: "are not those of PdConnector",
			Remedy: "first DynamoConnector, LMCacheConnectorV1 or FlexKVConnectorV1, then NixlConnector"}
	}
	if e := c.children[0].Engine; e != nil && e.Connector == kvbmTier && e.ModulePath == "" {
		e.ModulePath = kvbmModule // vLLM does not know the class otherwise
	}
	c.traits.Name = KVBMName
	return c, nil
}
