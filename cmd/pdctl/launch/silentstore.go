// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"maps"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/silentstore"
)

// silentStore is what engines of one store must be launched with.
type silentStore struct {
	class  string // rendered unless the settings name another
	roles  bool   // P is kv_producer and D kv_consumer; otherwise each engine is kv_both
	decode map[string]any
	env    []EnvVar
	beside []Companion
	note   Note
}

// silentStores, by the connector's name, follow vLLM 0.33.0 and vllm-ascend 0.26.0rc1; see
// docs/protocols/silent-stores.md.
var silentStores = map[string]silentStore{
	"ascend-store": {
		class: "AscendStoreConnector", roles: true,
		// Without it a kv_consumer loads nothing: pool_scheduler.py, get_num_new_matched_tokens.
		decode: map[string]any{"consumer_is_to_load": true},
		env:    []EnvVar{{Name: "PYTHONHASHSEED", Value: "0"}},
		note: Note{Path: "config.kv_connector_extra_config.backend",
			Text: "the backend mooncake needs mooncake_master and MOONCAKE_CONFIG_PATH, memcache and yuanrong their " +
				"own services: the same for all engines"},
	},
	"flexkv": {
		class: "FlexKVConnectorV1",
		note: Note{Path: "config.store",
			Text: "FLEXKV_CONFIG_PATH names FlexKV's own file: P and D find each other's KV only in its remote " +
				"storage, or with its distributed reuse; its CPU and SSD tiers belong to one host"},
	},
	"hf3fs": {
		class: "HF3FSKVConnector",
		beside: []Companion{{Name: "hf3fs-metadata", Command: []string{"python3", "-m",
			"vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.hf3fs_metadata_server", "--host", "127.0.0.1"}}},
		note: Note{Path: "config.store",
			Text: "vLLM 0.33.0 reads hf3fs_metadata_server_url and then uses http://localhost:18000 all the same: on " +
				"other hosts forward that port to the host of the metadata server"},
	},
	"ucm": {
		class: "UCMConnector",
		note: Note{Path: "config.kv_connector_extra_config.UCM_CONFIG_FILE",
			Text: "names UCM's own file, whose storage all engines must share"},
	},
}

// renderSilentStore gives each engine the store's class, and what the settings have for it.
func renderSilentStore(c connector.KVConnector, o *silentstore.Options, t Target) (Settings, error) {
	st := silentStores[c.Traits().Name]
	s := vllm(&KVTransfer{Connector: cmp.Or(o.Class, st.class), Role: "kv_both", Extra: maps.Clone(o.Extra)})
	s.Env, s.Companions, s.Notes = st.env, st.beside, []Note{st.note}
	if st.roles {
		s.KVTransfer.Role = KVRole(t.Endpoint.Role)
	}
	if s.KVTransfer.Role == "kv_consumer" && st.decode != nil {
		extra := maps.Clone(st.decode)
		maps.Copy(extra, o.Extra)
		s.KVTransfer.Extra = extra
	}
	s.noteIf(o.SettleTime > 0, "config.settleTime", settleTime)
	s.noLimits(t.Resources, "the store has limits of its own")
	return s, nil
}
