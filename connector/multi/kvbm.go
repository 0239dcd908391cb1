// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"encoding/json"
	"slices"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
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
// D runs NixlConnector. See [Connector.Render].
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
	if e := c.children[0].engine; e != nil && e.Connector == kvbmTier && e.ModulePath == "" {
		e.ModulePath = kvbmModule // vLLM does not know the class otherwise
	}
	c.traits.Name = KVBMName
	return c, nil
}

// renderKVBM makes PdConnector of P's MultiConnector, and gives D its NIXL child alone.
func (c *Connector) renderKVBM(t launch.Target) (launch.Settings, error) {
	switch launch.KVRole(t.Endpoint.Role) {
	case "kv_both":
		return launch.Settings{}, &config.FieldError{Path: "role",
			Problem: "is both, and an engine with PdConnector never loads another engine's KV",
			Remedy:  "write prefill or decode; a decode engine serves requests alone, too"}
	case "kv_consumer":
		s, kv, err := c.children[1].render(t)
		if err != nil {
			return s, config.Within(c.children[1].at, err)
		}
		out := launch.Settings{Engine: "vllm"}
		if err := collect(&out, &s, c.children[1].at); err != nil {
			return out, err
		}
		raw, err := json.Marshal(kv)
		if err == nil {
			out.KVTransfer = &launch.KVTransfer{}
			err = json.Unmarshal(raw, out.KVTransfer)
		}
		return out, err
	}
	s, err := c.renderMulti(t)
	if err != nil {
		return s, err
	}
	s.KVTransfer.Connector, s.KVTransfer.ModulePath, s.KVTransfer.Role = "PdConnector", kvbmModule, "kv_both"
	if c.children[0].traits.Name == kvbmTier {
		s.Notes = append(s.Notes, launch.Note{Path: "config.connectors",
			Text: "DYN_KVBM_CPU_CACHE_GB must say how much memory P's tier has; DYN_KVBM_DISK_CACHE_GB adds a disk"})
	}
	return s, nil
}
