// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"github.com/pdkit/pdkit/config"
)

const designsP2pNccl = `{"kv_buffer_size":"8e9","kv_port":"21001","proxy_ip":"10.0.1.1","proxy_port":"30001",` +
	`"http_port":"20001","send_type":"PUT_ASYNC","nccl_num_channels":"16"}`

var peerEngines = []launched{
	{rule: "the design's example; ids have no suffix before 0.14", connector: "p2pnccl", settings: designsP2pNccl,
		version: "0.10.0", want: []string{
			"env",
			`kv P2pNcclConnector kv_producer buffer_size=8000000000 connector_extra_config={"http_port":"20001",` +
				`"nccl_num_channels":"16","proxy_ip":"10.0.1.1","proxy_port":"30001","send_type":"PUT_ASYNC"} ` +
				"port=21001"}},
	{rule: "the engine's own address wins", connector: "p2pnccl", settings: designsP2pNccl,
		engine: "decode http://10.0.0.1:8100 zmqAddress=10.0.1.3:22001", version: "0.20.0",
		resources: config.Resources{MaxDisk: "1Gi"}, want: []string{
			"env VLLM_HOST_IP=10.0.1.3 VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1",
			`kv P2pNcclConnector kv_consumer buffer_size=8000000000 connector_extra_config={"http_port":"20001",` +
				`"nccl_num_channels":"16","proxy_ip":"10.0.1.1","proxy_port":"30001","send_type":"PUT_ASYNC"} ` +
				"port=22001",
			"idle config.kv_port resources.maxDisk"}},
	{rule: "the connector does not read kv_ip, and announces no port to nobody", connector: "p2pnccl",
		settings: `{"kv_ip":"10.0.0.1","http_port":1}`, engine: "decode http://10.0.0.1:8100 zmqAddress=d:1",
		want: []string{"kv P2pNcclConnector kv_consumer port=1", "idle config.kv_ip config.http_port"}},
	{rule: "an announced port is the one that the engine is launched with", connector: "p2pnccl",
		settings: `{"proxy_ip":"10.0.1.1"}`, engine: "decode https://h zmqAddress=d:1", want: []string{
			`kv P2pNcclConnector kv_consumer connector_extra_config={"http_port":"443","proxy_ip":"10.0.1.1",` +
				`"proxy_port":"30001"} port=1`}},
	{rule: "0.23 does not have it", connector: "p2pnccl", settings: `{"kv_ip":"10.0.0.1","http_port":1}`,
		engine: "decode http://10.0.0.1:8100 zmqAddress=d:1", version: "0.23.0", fails: "version"},
	{rule: "0.8 does not have it", connector: "p2pnccl", settings: `{"kv_ip":"10.0.0.1","http_port":1}`,
		engine: "decode http://10.0.0.1:8100 zmqAddress=d:1", version: "0.8.0", fails: "version"},
	{rule: "NCCL needs GPUs", connector: "p2pnccl", settings: `{"kv_ip":"10.0.0.1","http_port":1}`,
		engine: "decode http://10.0.0.1:8100 zmqAddress=d:1", cpu: true, fails: "cpu"},
	{rule: "an engine that is both serves what a pair cannot, without the connector or an address",
		connector: "p2pnccl", settings: `{"kv_ip":"10.0.0.1","http_port":1}`, engine: "both http://10.0.0.1:8100",
		want: []string{"engine vllm"}, not: []string{"\nkv "}},
	{rule: "the design's example, for P", connector: "pynccl", settings: `{"kv_rank":0}`, version: "0.7.3",
		want: []string{"env", "kv PyNcclConnector kv_producer parallel_size=2 rank=0"}},
	{rule: "the rank follows the role, and the V0 engine must be asked for", connector: "pynccl",
		settings: `{"kv_rank":0}`, engine: "decode http://h:1", index: 1,
		resources: config.Resources{MaxMemory: "1Gi"}, want: []string{
			"env VLLM_USE_V1=0", "kv PyNcclConnector kv_consumer parallel_size=2 rank=1",
			"idle config.kv_rank resources.maxMemory"}},
	{rule: "0.32 does not have it", connector: "pynccl", settings: `{"kv_rank":0}`, engine: "decode http://h:1",
		version: "0.32.0", fails: "version"},
	{rule: "0.5 does not have it", connector: "pynccl", settings: `{"kv_rank":0}`, engine: "decode http://h:1",
		version: "0.5.0", fails: "version"},
	{rule: "an engine has one rank", connector: "pynccl", settings: `{"kv_rank":0}`, engine: "both http://h:1",
		fails: "role"},
	{rule: "NCCL needs GPUs", connector: "pynccl", settings: `{"kv_rank":0}`, engine: "decode http://h:1", cpu: true,
		fails: "cpu"},
	{rule: "without the gateway's host engines announce themselves to nobody", connector: "moriio",
		engine: "prefill http://10.0.0.5:8100 tpSize=8 dpSize=2",
		beside: []string{"decode http://10.0.0.6:8200 handshakePort=6302"}, want: []string{
			"args --enable-prompt-tokens-details --tensor-parallel-size 8 --data-parallel-size 2",
			`kv MoRIIOConnector kv_producer connector_extra_config={"defer_timeout":60,"handshake_port":6301,` +
				`"host_ip":"10.0.0.5","http_port":8100,"notify_port":61005,"proxy_ip":"","proxy_ping_port":0,` +
				`"read_mode":false}`}},
	{rule: "engines announce themselves to the gateway", connector: "moriio", settings: `{"mode":"read"}`,
		engine: "decode http://10.0.0.6:8200 handshakePort=6302", version: "0.27.0", gateway: "10.0.0.1",
		beside: []string{"prefill http://10.0.0.5:8100 tpSize=8 dpSize=2"}, want: []string{
			`kv MoRIIOConnector kv_consumer connector_extra_config={"defer_timeout":60,"handshake_port":6302,` +
				`"host_ip":"10.0.0.6","http_port":8200,"notify_port":61005,"proxy_ip":"10.0.0.1",` +
				`"proxy_ping_port":36367,"read_mode":true}`}},
	{rule: "with the connector an engine that is both would serve nobody alone", connector: "moriio",
		engine: "both http://10.0.0.8:8300", cpu: true, resources: config.Resources{MaxDisk: "1Gi"},
		want: []string{"idle resources.maxDisk"}, not: []string{"\nkv "}},
	{rule: "the bootstrap server listens on --host", connector: "sglang", settings: `{"bootstrapPort":9000}`,
		engine: "prefill http://10.0.0.5:30000 bootstrapPort=9001 bootstrapHost=p.example dpSize=4", want: []string{
			"args --disaggregation-mode prefill --disaggregation-bootstrap-port 9001 " +
				"--disaggregation-transfer-backend mooncake --dp-size 4 --enable-dp-attention --enable-metrics",
			"notes attributes.bootstrapHost", "idle"}},
	{rule: "D has no bootstrap server", connector: "sglang", engine: "decode http://127.0.0.1:30001",
		want: []string{
			"args --disaggregation-mode decode --disaggregation-transfer-backend mooncake --enable-metrics", "notes",
			"idle"}},
	{rule: "an engine that is both must serve requests without a room", connector: "sglang",
		engine: "both http://127.0.0.1:30001", want: []string{"args --enable-metrics"}},
	{rule: "no setting is dropped in silence, and mooncake_tcp sets MC_FORCE_TCP itself", connector: "sglang",
		settings: `{"bootstrapPort":9000,"prefillCap":false}`, engine: "decode http://127.0.0.1:30001", cpu: true,
		resources: everyLimit, want: []string{
			"env", "notes cpu config.prefillCap",
			"idle config.bootstrapPort resources.maxMemory resources.maxDisk resources.maxBandwidth"}},
	{rule: "the backend mooncake of prefill", connector: "sglang", engine: "prefill http://e:1",
		has: []string{"--disaggregation-transfer-backend mooncake "}},
	{rule: "the backend mooncake of decode", connector: "sglang", engine: "decode http://e:1",
		has: []string{"--disaggregation-transfer-backend mooncake "}},
	{rule: "the backend mooncake_tcp of prefill on a CPU", connector: "sglang", engine: "prefill http://e:1",
		cpu: true, has: []string{"--disaggregation-transfer-backend mooncake_tcp "}},
	{rule: "the backend mooncake_tcp of decode on a CPU", connector: "sglang", engine: "decode http://e:1", cpu: true,
		has: []string{"--disaggregation-transfer-backend mooncake_tcp "}},
	{rule: "the backend mooncake_tcp of prefill, as the settings say", connector: "sglang",
		settings: `{"transferBackend":"mooncake_tcp"}`, engine: "prefill http://e:1",
		has: []string{"--disaggregation-transfer-backend mooncake_tcp "}},
	{rule: "the backend mooncake_tcp of decode, as the settings say", connector: "sglang",
		settings: `{"transferBackend":"mooncake_tcp"}`, engine: "decode http://e:1",
		has: []string{"--disaggregation-transfer-backend mooncake_tcp "}},
	{rule: "the backend nixl of prefill on a CPU, as the settings say", connector: "sglang",
		settings: `{"transferBackend":"nixl"}`, engine: "prefill http://e:1", cpu: true,
		has: []string{"--disaggregation-transfer-backend nixl "}},
	{rule: "the backend nixl of decode on a CPU, as the settings say", connector: "sglang",
		settings: `{"transferBackend":"nixl"}`, engine: "decode http://e:1", cpu: true,
		has: []string{"--disaggregation-transfer-backend nixl "}},
	{rule: "an engine that is both transfers nothing", connector: "sglang", settings: `{"transferBackend":"nixl"}`,
		engine: "both http://127.0.0.1:30001", want: []string{"idle config.transferBackend"},
		not: []string{"--disaggregation-transfer-backend"}},
	{rule: "a faulty attribute is named", connector: "sglang", engine: "prefill http://p:1 bootstrapPort=x",
		fails: "attributes.bootstrapPort"},
	{rule: "a context server has a file of its own", connector: "trtllm", engine: "prefill http://p:8001", index: 2,
		want: []string{
			"args --extra_llm_api_options trtllm-context-2.yaml", "notes", "idle",
			`file trtllm-context-2.yaml
disable_overlap_scheduler: true
cache_transceiver_config:
  backend: DEFAULT`}},
	{rule: "a generation server has metrics that pdctl verify reads", connector: "trtllm",
		engine: "decode http://d:8002", want: []string{
			`file trtllm-generation-0.yaml
return_perf_metrics: true
perf_metrics_max_requests: 100
cache_transceiver_config:
  backend: DEFAULT`}},
	{rule: "1.2 is not known to have generation first", connector: "trtllm",
		settings: `{"dispatch":"generation-first"}`, engine: "decode http://d:8002", version: "1.2.1",
		want: []string{
			"notes config.dispatch", "idle",
			`file trtllm-generation-0.yaml
return_perf_metrics: true
perf_metrics_max_requests: 100
cache_transceiver_config:
  backend: NIXL
  transceiver_runtime: PYTHON`}},
	{rule: "the newest has generation first", connector: "trtllm", settings: `{"dispatch":"generation-first"}`,
		engine: "decode http://d:8002", want: []string{"notes", "idle"}},
	{rule: "an engine has its ports and its lease", connector: "tpu", settings: `{"leaseDuration":"90s"}`,
		want: []string{
			"env TPU_KV_TRANSFER_PORT=9100 TPU_SIDE_CHANNEL_PORT=9600 TPU_P2P_WAIT_PULL_TIMEOUT=90",
			`kv TPUConnector kv_producer connector_module_path="tpu_inference.distributed.tpu_connector"`}},
	{rule: "an engine is not both", connector: "tpu", engine: "both http://10.0.0.5:8100",
		fails: "either sends or receives"},
	{rule: "the engines' class must be known", connector: "relay", fails: "kv_connector"},
	{rule: "the engines get their own class and settings", connector: "relay",
		settings: `{"kv_connector":"HouseConnector","kv_connector_extra_config":{"port":7000}}`,
		engine:   "decode http://10.0.0.5:8100",
		want:     []string{`kv HouseConnector kv_consumer connector_extra_config={"port":7000}`}},
	{rule: "engines are told nothing of KV, and the gateway heeds the rest", connector: "http",
		settings: `{"requestTimeout":"1s","maxRetries":1,"kvTransferMethod":"implicit"}`, resources: everyLimit,
		want: []string{
			"env", "notes  config.requestTimeout config.maxRetries",
			"idle config.kvTransferMethod resources.maxMemory resources.maxDisk resources.maxBandwidth"},
		has: []string{"computed twice"}, not: []string{"\nkv "}},
}

var keysOfTensorRT = []launched{
	{rule: "no setting is dropped in silence, and no key shown", connector: "trtllm",
		settings: `{"machineID":3,"authKey":"the key","dispatch":"context-first"}`, engine: "decode http://d:1",
		cpu: true, resources: everyLimit, want: []string{
			"notes config.authKey config.machineID config.dispatch cpu",
			"idle resources.maxMemory resources.maxDisk resources.maxBandwidth"},
		has: []string{"# internal_request_auth_key"}, not: []string{"the key"}},
}
