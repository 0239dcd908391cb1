// SPDX-License-Identifier: Apache-2.0

package silentstore

import (
	"cmp"
	"maps"
	"slices"

	"github.com/pdkit/pdkit/connector/launch"
)

// store is what engines of one store must be launched with.
type store struct {
	name    string
	classes []string // the first is rendered unless the settings name another
	roles   bool     // P is kv_producer and D kv_consumer; otherwise each engine is kv_both
	decode  map[string]any
	env     []launch.EnvVar
	beside  []launch.Companion
	notes   []launch.Note
}

// stores follow vLLM 0.33.0 and vllm-ascend 0.26.0rc1; see docs/protocols/silent-stores.md.
var stores = []store{
	{
		name: "ascend-store", classes: []string{"AscendStoreConnector", "MooncakeConnectorStoreV1"}, roles: true,
		// Without it a kv_consumer loads nothing: pool_scheduler.py, get_num_new_matched_tokens.
		decode: map[string]any{"consumer_is_to_load": true},
		env:    []launch.EnvVar{{Name: "PYTHONHASHSEED", Value: "0"}},
		notes: []launch.Note{{Path: "config.kv_connector_extra_config.backend",
			Text: "the backend mooncake needs mooncake_master and MOONCAKE_CONFIG_PATH, memcache and yuanrong their " +
				"own services: the same for all engines"}},
	},
	{
		name: "flexkv", classes: []string{"FlexKVConnectorV1"},
		notes: []launch.Note{{Path: "config.store",
			Text: "FLEXKV_CONFIG_PATH names FlexKV's own file: P and D find each other's KV only in its remote " +
				"storage, or with its distributed reuse; its CPU and SSD tiers belong to one host"}},
	},
	{
		name: "hf3fs", classes: []string{"HF3FSKVConnector"},
		beside: []launch.Companion{{Name: "hf3fs-metadata", Command: []string{"python3", "-m",
			"vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_metadata_server", "--host", "127.0.0.1"}}},
		notes: []launch.Note{{Path: "config.store",
			Text: "vLLM 0.33.0 reads hf3fs_metadata_server_url and then uses http://localhost:18000 all the same: on " +
				"other hosts forward that port to the host of the metadata server"}},
	},
	{
		name: "ucm", classes: []string{"UCMConnector"},
		notes: []launch.Note{{Path: "config.kv_connector_extra_config.UCM_CONFIG_FILE",
			Text: "names UCM's own file, whose storage all engines must share"}},
	},
}

// Render gives each engine the store's class, and what the settings have for it.
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	st := c.store
	s := launch.Settings{
		Engine: "vllm",
		KVTransfer: &launch.KVTransfer{Connector: cmp.Or(c.opts.Class, st.classes[0]), Role: "kv_both",
			Extra: maps.Clone(c.opts.Extra)},
		Args:       []string{"--enable-prompt-tokens-details"},
		Env:        st.env,
		Companions: st.beside,
		Notes:      slices.Clone(st.notes),
	}
	if st.roles {
		s.KVTransfer.Role = launch.KVRole(t.Endpoint.Role)
	}
	if s.KVTransfer.Role == "kv_consumer" && st.decode != nil {
		extra := maps.Clone(st.decode)
		maps.Copy(extra, c.opts.Extra)
		s.KVTransfer.Extra = extra
	}
	if c.opts.SettleTime > 0 {
		s.Notes = append(s.Notes, launch.Note{Path: "config.settleTime",
			Text: "the gateway waits that long between the legs; no setting of an engine"})
	}
	s.Notes = append(s.Notes, launch.NoLimits(t.Resources, "the store has limits of its own")...)
	return s, nil
}
