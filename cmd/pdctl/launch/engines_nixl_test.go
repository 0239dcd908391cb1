// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"github.com/pdkit/pdkit/config"
)

var nixlEngines = []launched{
	{rule: "a prefill engine produces", connector: "nixl", settings: "{}", want: []string{
		"env VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 PYTHONHASHSEED=0",
		"args --enable-prompt-tokens-details",
		`kv NixlConnector kv_producer connector_extra_config={"kv_lease_duration":30} ` +
			`load_failure_policy="fail"`,
		"notes", "idle"}},
	{rule: "a decode engine consumes", connector: "nixl", settings: "{}", engine: "decode http://10.0.0.1:8000",
		version: "0.32.0", want: []string{
			"env VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 PYTHONHASHSEED=0",
			"args --enable-prompt-tokens-details",
			`kv NixlConnector kv_consumer connector_extra_config={"kv_lease_duration":30} ` +
				`load_failure_policy="fail"`,
			"notes", "idle"}},
	{rule: "the role both is deprecated in vLLM", connector: "nixl", settings: "{}",
		engine: "both http://10.0.0.1:8000", version: "0.22.0", want: []string{
			"env VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 PYTHONHASHSEED=0",
			"args --enable-prompt-tokens-details",
			`kv NixlConnector kv_both connector_extra_config={"kv_lease_duration":30} load_failure_policy="fail"`,
			"notes role", "idle"}, has: []string{"kv_both is deprecated"}},
	{rule: "the lease was a variable before 0.22", connector: "nixl", settings: "{}", version: "0.21.1",
		want: []string{
			"env VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 PYTHONHASHSEED=0 " +
				"VLLM_NIXL_ABORT_REQUEST_TIMEOUT=30",
			"args --enable-prompt-tokens-details", `kv NixlConnector kv_producer load_failure_policy="fail"`, "notes",
			"idle"}},
	{rule: "a release without a failure policy gets none", connector: "nixl", settings: "{}", version: "0.11.0",
		want: []string{
			"env VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 PYTHONHASHSEED=0 " +
				"VLLM_NIXL_ABORT_REQUEST_TIMEOUT=30",
			"args --enable-prompt-tokens-details", "kv NixlConnector kv_producer", "notes", "idle"}},
	{rule: "a lease has whole seconds, rounded up, and a CPU its buffer", connector: "nixl",
		settings: `{"leaseDuration":"1500ms"}`, engine: "prefill http://127.0.0.1:8000", cpu: true, want: []string{
			`kv NixlConnector kv_producer buffer_device="cpu" connector_extra_config={"kv_lease_duration":2} ` +
				`load_failure_policy="fail"`},
		has: []string{"a loopback address works only if all engines are on one machine"}},
	{rule: "bidirectional needs a lease of D's, and P's /render", connector: "nixl",
		settings: `{"bidirectional":true,"conversationTTL":"90s"}`, engine: "decode http://10.0.0.1:8000",
		want: []string{
			"args --enable-prompt-tokens-details --enable-scale-out",
			`kv NixlConnector kv_consumer connector_extra_config={"bidirectional_kv_xfer":true,` +
				`"decoder_kv_blocks_ttl":90,"kv_lease_duration":30} load_failure_policy="fail"`}},
	{rule: "bidirectional needs 0.22", connector: "nixl", settings: `{"bidirectional":true}`,
		engine: "decode http://10.0.0.1:8000", version: "0.21.0", fails: "too old"},
	{rule: "a limit has no effect", connector: "nixl", settings: "{}", resources: everyLimit,
		want: []string{"idle resources.maxMemory resources.maxDisk resources.maxBandwidth"}},
	{rule: "no port may be left", connector: "nixl", settings: `{"port":65535}`, engine: "decode http://10.0.0.1:8002",
		beside: []string{"decode http://10.0.0.1:8000 sideChannelPort=65535"}, fails: "no port"},
	{rule: "a faulty port is named", connector: "nixl", settings: "{}",
		engine: "prefill http://10.0.0.1:8100 sideChannelPort=x", fails: "sideChannelPort"},
	{rule: "P is launched with what D is told about it", connector: "nixl-push", settings: `{"leaseDuration":"45s"}`,
		engine: "prefill http://10.0.0.1:8100 engineID=pdkit-prefill sideChannelHost=10.1.0.1 " +
			"sideChannelPort=5777 tpSize=4 ppSize=2 dpSize=3", want: []string{
			"env VLLM_NIXL_SIDE_CHANNEL_HOST=10.1.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5777 PYTHONHASHSEED=0",
			"args --enable-prompt-tokens-details --tensor-parallel-size 4 --pipeline-parallel-size 2 " +
				"--data-parallel-size 3",
			`kv NixlPushConnector kv_producer engine_id="pdkit-prefill" ` +
				`connector_extra_config={"kv_lease_duration":45} load_failure_policy="fail"`,
			"notes attributes.engineID", "idle"}},
	{rule: "a pod of P is launched with its own ranks", connector: "nixl-push",
		engine: "prefill http://10.0.0.1:8100 engineID=e sideChannelPort=5600 dpSize=4 dpSizeLocal=2 dpStartRank=2",
		want: []string{"args --enable-prompt-tokens-details --data-parallel-size 4 --data-parallel-size-local 2 " +
			"--data-parallel-start-rank 2",
			"notes attributes.dpStartRank attributes.engineID"}},
	{rule: "D needs no fixed id, and P has the first port of their host", connector: "nixl-push",
		engine: "decode http://10.0.0.1:8001", cpu: true,
		beside:    []string{"prefill http://10.0.0.1:8100 engineID=pdkit-prefill sideChannelPort=5600"},
		resources: config.Resources{MaxDisk: "1Gi"}, want: []string{
			"env VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5601 PYTHONHASHSEED=0 " +
				"UCX_TLS=tcp",
			`kv NixlPushConnector kv_consumer buffer_device="cpu" ` +
				`connector_extra_config={"kv_lease_duration":30} load_failure_policy="fail"`,
			"idle resources.maxDisk"}},
	{rule: "nobody could be told of an id that P makes by itself", connector: "nixl-push",
		fails: "attributes.engineID"},
	{rule: "P's response names its id if the legs are serial", connector: "nixl-push",
		settings: `{"dispatch":"serial"}`, want: []string{"idle"}},
	{rule: "a release without the class is refused", connector: "nixl-push", engine: "decode http://10.0.0.1:8000",
		version: "0.22.0", fails: "no NixlPushConnector"},
}
