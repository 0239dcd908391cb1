// SPDX-License-Identifier: Apache-2.0

package launch_test

const anEnginesOwnSettings = `{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_both",` +
	`"kv_port":"5","kv_load_failure_policy":"fail",` +
	`"kv_connector_extra_config":{"kv_lease_duration":300,"some_new_setting":true}},` +
	`{"type":"sharedstorage"}]}`

const designsMulti = `{"connectors":[{"kv_connector":"NixlConnector","kv_role":"kv_both"},` +
	`{"kv_connector":"SharedStorageConnector","kv_role":"kv_both",` +
	`"kv_connector_extra_config":{"shared_storage_path":"local_storage"}}]}`

var multiEngines = []launched{
	{rule: "children that need different values of a variable cannot run in one engine", connector: "multi",
		settings: `{"connectors":[{"type":"nixl","config":{"protocol":"rdma"}},{"type":"lmcache-pd"}]}`,
		engine:   "decode http://10.0.0.2:8200 receiverInitPorts=8300 receiverAllocPorts=8400",
		fails:    "connectors[1]: wants another value of UCX_TLS than a connector before it"},
	{rule: "a variable that several children need is given once", connector: "multi",
		settings: `{"connectors":[{"type":"nixl"},{"type":"lmcache-pd"}]}`,
		engine:   "decode http://10.0.0.2:8200 receiverInitPorts=8300 receiverAllocPorts=8400", want: []string{
			"env VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.2 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 PYTHONHASHSEED=0 " +
				"UCX_TLS=cuda_ipc,cuda_copy,tcp LMCACHE_CONFIG_FILE=lmcache-pd-decode-0.yaml"}},
	{rule: "P runs PdConnector, with both tiers", connector: "kvbm", want: []string{
		`kv PdConnector kv_both connector_extra_config={"connectors":[{"kv_connector":"DynamoConnector",` +
			`"kv_connector_module_path":"kvbm.vllm_integration.connector","kv_role":"kv_both"},` +
			`{"kv_connector":"NixlConnector","kv_connector_extra_config":{"kv_lease_duration":30},` +
			`"kv_load_failure_policy":"fail","kv_role":"kv_producer"}]} ` +
			`connector_module_path="kvbm.vllm_integration.connector"`}},
	{rule: "PdConnector asks only its first child what it can load, so that D runs NIXL alone", connector: "kvbm",
		engine: "decode http://10.0.0.2:8200", want: []string{
			"env VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.2 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 PYTHONHASHSEED=0",
			`kv NixlConnector kv_consumer connector_extra_config={"kv_lease_duration":30} ` +
				`load_failure_policy="fail"`}, not: []string{"DynamoConnector"}},
	{rule: "an engine that is both would never load another's KV", connector: "kvbm",
		engine: "both http://10.0.0.2:8200", fails: "never loads another engine's KV"},
	{rule: "vllm-ascend has AscendStoreConnector keep prefixes beside MooncakeConnectorV1",
		connector: "multi",
		settings: `{"connectors":[{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_producer","kv_port":"20001",` +
			`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,` +
			`"tp_size":8}}},{"kv_connector":"AscendStoreConnector","kv_role":"kv_producer",` +
			`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"}}]}`, want: []string{
			"kv MultiConnector kv_producer " +
				`connector_extra_config={"connectors":[{"kv_connector":"MooncakeConnectorV1",` +
				`"kv_connector_extra_config":{"decode":{"dp_size":1,"tp_size":8},"prefill":{"dp_size":1,` +
				`"tp_size":8}},"kv_port":20001,"kv_role":"kv_producer"},{"kv_connector":"AscendStoreConnector",` +
				`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"},"kv_role":"kv_producer"}]}`}},
	{rule: "vllm-ascend has MooncakeConnectorStoreV1 keep prefixes beside MooncakeConnectorV1",
		connector: "multi",
		settings: `{"connectors":[{"kv_connector":"MooncakeConnectorV1","kv_role":"kv_producer","kv_port":"20001",` +
			`"kv_connector_extra_config":{"prefill":{"dp_size":1,"tp_size":8},"decode":{"dp_size":1,` +
			`"tp_size":8}}},{"kv_connector":"MooncakeConnectorStoreV1","kv_role":"kv_producer",` +
			`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"}}]}`, want: []string{
			"kv MultiConnector kv_producer " +
				`connector_extra_config={"connectors":[{"kv_connector":"MooncakeConnectorV1",` +
				`"kv_connector_extra_config":{"decode":{"dp_size":1,"tp_size":8},"prefill":{"dp_size":1,` +
				`"tp_size":8}},"kv_port":20001,"kv_role":"kv_producer"},{"kv_connector":"MooncakeConnectorStoreV1",` +
				`"kv_connector_extra_config":{"backend":"mooncake","lookup_rpc_port":"0"},"kv_role":"kv_producer"}]}`}},
	{rule: "an engine's own settings are taken as they stand", connector: "multi", settings: anEnginesOwnSettings,
		engine: "decode http://10.0.0.2:8200", want: []string{
			"args --enable-prompt-tokens-details",
			`kv MultiConnector kv_both connector_extra_config={"connectors":[{"kv_connector":"NixlConnector",` +
				`"kv_connector_extra_config":{"kv_lease_duration":300,"some_new_setting":true},` +
				`"kv_load_failure_policy":"fail","kv_port":5,"kv_role":"kv_both"},` +
				`{"kv_connector":"ExampleConnector","kv_role":"kv_both"}]}`},
		has: []string{"# config.connectors[1].config.sharedStoragePath: "}},
	{rule: "a child that cannot be rendered is named", connector: "multi", settings: anEnginesOwnSettings,
		engine: "decode http://10.0.0.2:8200", version: "0.1.0", fails: "connectors["},
	{rule: "a child that needs nothing in the requests has the engine's configuration", connector: "multi",
		settings: `{"connectors":[{"type":"nixl"},{"kv_connector":"OffloadingConnector","kv_role":"kv_both",` +
			`"kv_connector_extra_config":{"num_cpu_blocks":1000}},{"kv_connector":"HiSparseConnector"}]}`,
		has: []string{
			`{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"num_cpu_blocks":1000},` +
				`"kv_role":"kv_both"},{"kv_connector":"HiSparseConnector","kv_role":"kv_both"}`}},
	{rule: "the design's example, for its release", connector: "multi", settings: designsMulti, version: "0.10.0",
		has: []string{
			`{"kv_connector":"SharedStorageConnector",` +
				`"kv_connector_extra_config":{"shared_storage_path":"local_storage"},"kv_role":"kv_both"}`}},
	{rule: "the design's example, with the class's name in newer engines", connector: "multi", settings: designsMulti,
		has: []string{`"kv_connector":"ExampleConnector"`}},
}
