// SPDX-License-Identifier: Apache-2.0

// Package lmcacheconf knows LMCache's own settings: the keys of its configuration file and of vLLM's
// kv_connector_extra_config. The connectors lmcache and lmcache-pd accept them beside their own settings and write them
// into the engines' files.
//
// Source: LMCache's lmcache/v1/config.py at 000620e3 (late 2026), its definitions and aliases. The names that it no
// longer has come from examples/disagg_prefill/1p1d/configs at 216b8e42 (enable_nixl, 2025).
package lmcacheconf

// kind is the kind of a key's value. LMCache also reads most kinds from text, since they may come from the environment.
type kind uint8

const (
	text kind = iota
	boolean
	integer
	number
	integers // a list, one number, or a comma-separated text
	list     // of texts, or a comma-separated text
	anything
)

// keys are the keys of LMCache's file.
var keys = map[string]kind{
	"chunk_size": integer, "local_cpu": boolean, "max_local_cpu_size": number,
	"local_cpu_use_hugepages": boolean, "reserve_local_cpu_size": number,
	"local_disk": text, "local_disk_path_sharding": text, "max_local_disk_size": number,
	"remote_url": text, "remote_serde": text,
	"use_layerwise": boolean, "save_decode_cache": boolean, "pre_caching_hash_algorithm": text,
	"enable_blending": boolean, "blend_recompute_ratios": anything,
	"blend_thresholds": anything, "blend_check_layers": integers,
	"blend_min_tokens": integer, "blend_special_str": text, "retrieve_locations": list, "store_location": text,
	"enable_p2p": boolean, "p2p_host": text, "p2p_init_ports": integers,
	"p2p_lookup_ports": integers, "mp_host": text, "mp_port": integer,
	"enable_controller": boolean, "lmcache_instance_id": text,
	"controller_pull_url": text, "controller_reply_url": text,
	"lmcache_worker_ports": integers, "lmcache_worker_ids": integers,
	"lmcache_worker_heartbeat_delay_time": integer, "lmcache_worker_heartbeat_time": integer,
	"enable_pd": boolean, "pd_role": text, "pd_buffer_size": integer, "pd_buffer_device": text,
	"pd_peer_host": text, "pd_peer_init_port": integers, "pd_peer_alloc_port": integers, "pd_peer_query_port": integers,
	"pd_proxy_host": text, "pd_proxy_port": integer,
	"pd_allocation_timeout_sec": number, "pd_shutdown_timeout_sec": number,
	"pd_condition_poll_interval_sec": number, "pd_max_prefill_len": integer, "pd_backend_mode": text,
	"pd_skip_proxy_notification": boolean, "pd_bidirectional": boolean, "transfer_channel": text,
	"nixl_backends": list, "nixl_buffer_size": integer, "nixl_buffer_device": text,
	"gds_path": text, "gds_path_sharding": text, "gds_buffer_size": integer, "maru_path": text,
	"maru_pool_size": number, "use_gds": boolean, "gds_backend": text,
	"audit_actual_remote_url": text, "internal_api_server_host": text,
	"extra_config": anything, "save_unfull_chunk": boolean,
	"blocking_timeout_secs": integer, "external_lookup_client": text, "py_enable_gc": boolean, "cache_policy": text,
	"cost_aware_half_life_seconds": number, "cost_aware_ewma_alpha": number,
	"numa_mode": text, "enable_async_loading": boolean,
	"internal_api_server_enabled": boolean, "internal_api_server_port_start": integer, "priority_limit": integer,
	"internal_api_server_include_index_list": integers, "internal_api_server_socket_path_prefix": text,
	"runtime_plugin_locations": list, "storage_plugins": list, "remote_storage_plugins": list,
	"lookup_timeout_ms": integer, "min_retrieve_tokens": integer,
	"hit_miss_ratio": number, "lookup_server_worker_ids": integers,
	"enable_scheduler_bypass_lookup": boolean, "script_allowed_imports": list,
	"enable_lazy_memory_allocator": boolean, "lazy_memory_initial_ratio": number,
	"lazy_memory_expand_trigger_ratio": number,
	"lazy_memory_step_ratio":           number, "lazy_memory_safe_size": number, "enable_chunk_statistics": boolean,
	"chunk_statistics_auto_start_statistics": boolean, "chunk_statistics_auto_exit_timeout_hours": number,
	"chunk_statistics_auto_exit_target_unique_chunks": integer, "chunk_statistics_strategy": text,
	"enable_kv_events": boolean, "use_gpu_connector_v3": boolean,
	"pin_timeout_sec": integer, "pin_check_interval_sec": integer,
	"remote_config_url": text, "app_id": text,
	"enable_hidden_state_cache": boolean, "max_hidden_state_cpu_size": number,
	"hidden_state_layers": integers, "hidden_states_retrieve_mode": text,
}

// extra are the keys of kv_connector_extra_config that LMCache's connectors for vLLM read under exactly these names.
// Keys that begin with "lmcache.mp." belong to LMCacheMPConnector. They differ between releases, so they are passed on
// unchecked.
var extra = map[string]kind{
	"discard_partial_chunks": boolean, "lmcache_rpc_port": anything,
	"skip_last_n_tokens": integer, "use_native": boolean,
}

// gone are keys that configurations have but LMCache does not read, with the reason. One of them is a key of
// kv_connector_extra_config.
var gone = map[string]string{
	"config_path": "LMCache reads the file that the environment variable LMCACHE_CONFIG_FILE names: the one " +
		"rendered here",
	"nixl_enable_gc": "LMCache has no such setting any more",
}

// aliases are older names that LMCache still reads for these settings.
var aliases = map[string]string{
	"enable_xpyd": "enable_pd", "enable_nixl": "enable_pd", "nixl_role": "pd_role",
	"nixl_peer_host": "pd_peer_host", "nixl_receiver_host": "pd_peer_host",
	"nixl_peer_port": "pd_peer_init_port", "nixl_receiver_port": "pd_peer_init_port",
	"nixl_peer_init_port": "pd_peer_init_port", "nixl_peer_alloc_port": "pd_peer_alloc_port",
	"nixl_proxy_host": "pd_proxy_host", "nixl_proxy_port": "pd_proxy_port",
	"controller_url": "controller_pull_url", "lmcache_worker_port": "lmcache_worker_ports",
	"plugin_locations": "runtime_plugin_locations", "external_backends": "storage_plugins",
}

// pdAliases are older names only if the engines transfer to each other. Otherwise they are settings of another backend.
var pdAliases = map[string]string{"nixl_buffer_size": "pd_buffer_size", "nixl_buffer_device": "pd_buffer_device"}
