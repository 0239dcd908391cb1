// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"github.com/pdkit/pdkit/config"
)

const everyOfMooncake = `{"bootstrapPort":9998,"abortTimeout":"90s","num_workers":20,` +
	`"mooncake_protocol":"tcp","device_name":"mlx5_0,mlx5_1",` +
	`"prefill_side_swa_replay":true}`

var mooncakeEngines = []launched{
	{rule: "P has a bootstrap server, and 480 s are long for an orphan", connector: "mooncake",
		beside: []string{"decode http://10.0.0.2:8200"}, want: []string{
			"env VLLM_MOONCAKE_BOOTSTRAP_PORT=8998", `kv MooncakeConnector kv_producer load_failure_policy="fail"`,
			"notes config.abortTimeout", "idle"}},
	{rule: "D has none", connector: "mooncake", engine: "decode http://10.0.0.2:8200",
		beside: []string{"prefill http://10.0.0.1:8100"},
		want:   []string{"env", `kv MooncakeConnector kv_consumer load_failure_policy="fail"`}},
	{rule: "an engine may do both", connector: "mooncake", engine: "both http://10.0.0.1:8100",
		want: []string{`kv MooncakeConnector kv_both load_failure_policy="fail"`}},
	{rule: "all settings reach the engine", connector: "mooncake", settings: everyOfMooncake, want: []string{
		"env VLLM_MOONCAKE_BOOTSTRAP_PORT=9998 VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=90",
		`kv MooncakeConnector kv_producer connector_extra_config={"device_name":"mlx5_0,mlx5_1",` +
			`"mooncake_protocol":"tcp","num_workers":20,"prefill_side_swa_replay":true} ` +
			`load_failure_policy="fail"`,
		"notes", "idle"}},
	{rule: "the attribute wins", connector: "mooncake", settings: everyOfMooncake,
		engine: "prefill http://h:8100 bootstrapURL=http://h", want: []string{
			"env VLLM_MOONCAKE_BOOTSTRAP_PORT=80 VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=90", "idle config.bootstrapPort"}},
	{rule: "with a server elsewhere the engine launches none", connector: "mooncake",
		settings: `{"bootstrap_server_address":"boot:8998"}`, engine: "prefill http://h:8100 bootstrapURL=http://h",
		want: []string{
			"env",
			`kv MooncakeConnector kv_producer connector_extra_config={"bootstrap_server_address":"boot:8998"} ` +
				`load_failure_policy="fail"`}},
	{rule: "a faulty port is named", connector: "mooncake", engine: "prefill http://h:1 bootstrapPort=x",
		fails: "bootstrapPort"},
	{rule: "two bootstrap servers of one port are told of", connector: "mooncake",
		beside: []string{"prefill http://10.0.0.1:8101"},
		want:   []string{"notes attributes.bootstrapPort config.abortTimeout"}},
	{rule: "two of different ports are not", connector: "mooncake",
		beside: []string{"prefill http://10.0.0.1:8101 bootstrapPort=8999"},
		want:   []string{"notes config.abortTimeout", "idle"}},
	{rule: "0.12 speaks an older protocol", connector: "mooncake", version: "0.12.0",
		want: []string{"notes version config.abortTimeout"}},
	{rule: "0.15 speaks an older protocol", connector: "mooncake", version: "0.15.0",
		want: []string{"notes version config.abortTimeout"}},
	{rule: "0.16 has a bootstrap server", connector: "mooncake", version: "0.16.0",
		want: []string{"notes config.abortTimeout"}},
	{rule: "0.32 has a bootstrap server", connector: "mooncake", version: "0.32.0",
		want: []string{"notes config.abortTimeout"}},
	{rule: "on a CPU it goes over TCP, by a module of its own", connector: "mooncake", cpu: true, want: []string{
		"env MC_FORCE_TCP=true VLLM_MOONCAKE_BOOTSTRAP_PORT=8998",
		`kv MooncakeConnector kv_producer connector_extra_config={"mooncake_protocol":"tcp"} ` +
			`connector_module_path="mooncake_cpu" load_failure_policy="fail"`}},
	{rule: "a limit has no effect", connector: "mooncake", resources: everyLimit,
		want: []string{"idle resources.maxMemory resources.maxDisk resources.maxBandwidth"}},
	{rule: "P knows the sizes of both", connector: "ascend-layerwise", settings: `{"kvPort":36000}`,
		engine: "prefill http://10.0.0.5:8100 tpSize=8", beside: []string{"decode http://10.0.0.6:8200 tpSize=4"},
		want: []string{
			`kv MooncakeLayerwiseConnector kv_producer connector_extra_config={"decode":{"dp_size":1,` +
				`"tp_size":4},"prefill":{"dp_size":1,"tp_size":8}} port=36000`}},
	{rule: "D on another host cannot reach 127.0.0.1", connector: "ascend-layerwise", settings: `{"kvPort":36000}`,
		engine: "decode http://10.0.0.6:8200 tpSize=4", beside: []string{"prefill http://10.0.0.5:8100 tpSize=8"},
		want: []string{
			`kv MooncakeLayerwiseConnector kv_consumer connector_extra_config={"decode":{"dp_size":1,` +
				`"tp_size":4},"prefill":{"dp_size":1,"tp_size":8}} port=36000`},
		has: []string{"# config.callbackURL: is loopback"}},
	{rule: "an engine that is both would be paired, and P would push nothing", connector: "ascend-layerwise",
		settings: `{"kvPort":36000}`, engine: "both http://10.0.0.7:8300", fails: "either sends or receives"},
	{rule: "it is a class of its own", connector: "mooncake-hybrid", want: []string{
		`kv MooncakeHybridConnector kv_producer connector_extra_config={"decode":{"dp_size":1,"tp_size":1},` +
			`"prefill":{"dp_size":1,"tp_size":1}} port=30000`}},
	{rule: "P has its sizes, its port and its lease", connector: "mooncake-ascend",
		settings: `{"leaseDuration":"90s"}`, engine: "prefill http://10.0.0.5:8100 tpSize=8 dpSize=2",
		beside: []string{"decode http://10.0.0.6:8200 dpSize=16 kvPort=36200"}, want: []string{
			"env VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=90",
			"args --enable-prompt-tokens-details --tensor-parallel-size 8 --data-parallel-size 2",
			`kv MooncakeConnectorV1 kv_producer connector_extra_config={"decode":{"dp_size":16,"tp_size":1},` +
				`"prefill":{"dp_size":2,"tp_size":8}} port=30000`}},
	{rule: "before 0.11 D had a rank and a buffer", connector: "mooncake-ascend", settings: `{"leaseDuration":"90s"}`,
		engine: "decode http://10.0.0.6:8200 dpSize=16 kvPort=36200", version: "0.10.1",
		beside: []string{"prefill http://10.0.0.5:8100 tpSize=8 dpSize=2"}, want: []string{
			`kv MooncakeConnectorV1 kv_consumer buffer_device="npu" ` +
				`connector_extra_config={"decode":{"dp_size":16,"tp_size":1},"prefill":{"dp_size":2,"tp_size":8}} ` +
				"parallel_size=1 port=36200 rank=1"}},
	{rule: "a limit has no effect", connector: "mooncake-ascend", settings: `{"leaseDuration":"90s"}`,
		engine:    "decode http://10.0.0.6:8200 dpSize=16 kvPort=36200",
		beside:    []string{"prefill http://10.0.0.5:8100 tpSize=8 dpSize=2"},
		resources: config.Resources{MaxMemory: "1Gi"}, want: []string{"idle resources.maxMemory"}},
	{rule: "an engine that is both is refused", connector: "mooncake-ascend", settings: `{"leaseDuration":"90s"}`,
		engine: "both http://10.0.0.7:8300", fails: "either sends or receives"},
	{rule: "refused: P's tpSize is no multiple of D's", connector: "mooncake-ascend",
		engine: "prefill http://10.0.0.5:8100 tpSize=4", beside: []string{"decode http://d:1 tpSize=8"},
		fails: "attribute tpSize"},
	{rule: "refused: two P with different tpSize", connector: "mooncake-ascend",
		engine: "prefill http://10.0.0.5:8100 tpSize=4", beside: []string{"prefill http://q:1 tpSize=8"},
		fails: "attribute tpSize"},
	{rule: "refused: two P with different dpSize", connector: "mooncake-ascend",
		engine: "prefill http://10.0.0.5:8100 tpSize=4", beside: []string{"prefill http://q:1 tpSize=4 dpSize=2"},
		fails: "attribute dpSize"},
	{rule: "refused: an attribute that is no whole number", connector: "mooncake-ascend",
		engine: "prefill http://10.0.0.5:8100 tpSize=4", beside: []string{"decode http://d:1 tpSize=x"},
		fails: "attribute tpSize"},
}
