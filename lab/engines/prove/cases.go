// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import "context"

// verification is a connector that real engines on a CPU prove: its launch settings start the engines, and pdctl verify
// judges them. The README's table of connectors calls a connector proven if it has an entry here.
//
// In its texts $FOLDER is a folder that both engines share. Each other name is a free port, and $PREFILL and $DECODE
// are the engines' side ports. In engine a name is one of install.sh and stands for its value there.
type verification struct {
	connector string
	engine    string   // what the README's table says of the engines
	module    string   // the module of the engine's connector, if a CPU needs another one than is rendered
	prefill   []string // attributes of the prefill engine, NAME=VALUE
	decode    []string
	beside    []string // more arguments of the program that runs beside the engines
	stages    []stage
	// aloneOnD says that D's text is the reference, since P cannot serve a request alone
	aloneOnD bool
	// both says that a new D needs a new P
	both bool
	// proves, if not nil, proves the connector in its own way, in place of the stages
	proves func(context.Context, *lab) error
}

// stage is one gateway in front of the engines, judged by pdctl verify. Engines are started anew only if their settings
// differ from those of the stage before.
type stage struct {
	what      string // "", or what differs from the other stages
	config    string // the connector's settings, JSON; "" are those of the stage before
	connector string // of the gateway, if it is not the verification's
	orphan    bool   // both legs are sent at once: after a failed prefill decode must not wait

	// A broken twin has a reason: pdctl verify must end with 1 and give it.
	reason string
	// broken is the engine in whose settings, files and programs the texts of swap are replaced: old, new, old, new …
	broken string
	swap   []string
}

// behindHTTP is a twin with the same engines: without the connector's members D computes each prompt itself.
var behindHTTP = stage{what: "behind http", connector: "http", reason: "connector http relays nothing"}

const (
	notShared = "the store is not shared"
	decode    = "decode"
	nixl      = "vLLM $VLLM with nixl $NIXL"
)

// verifications are all connectors that run on a CPU, in the order in which they are proven.
var verifications = []verification{
	{connector: "nixl", engine: nixl, prefill: []string{"sideChannelPort=$PREFILL"},
		decode: []string{"sideChannelPort=$DECODE"}, stages: []stage{{}, behindHTTP}},
	{connector: "lmcache", engine: "vLLM $VLLM with the server of LMCache $LMCACHE",
		beside: []string{"--http-port", "$HTTP", "--disable-observability"},
		stages: []stage{
			{config: `{"engineClass":"LMCacheMPConnector","serverEndpoints":["127.0.0.1:$SERVER"],"chunk_size":64,` +
				`"localConfig":{"maxMemoryMB":256}}`},
			{what: "a server for each engine", reason: notShared, broken: decode,
				swap: []string{"$SERVER", "$SERVER2", "$HTTP", "$HTTP2"}},
		}},
	{connector: "sglang", engine: "SGLang $SGLANG with mooncake-transfer-engine $MOONCAKE", proves: proveSGLang},
	{connector: "nixl-push", engine: nixl, decode: []string{"sideChannelPort=$DECODE"},
		prefill: []string{"engineID=pdkit-prefill", "sideChannelHost=127.0.0.1", "sideChannelPort=$PREFILL"},
		stages: []stage{{what: "together", config: `{"dispatch":"together"}`, orphan: true},
			{what: "serial", config: `{"dispatch":"serial"}`}, behindHTTP}},
	{connector: "sharedstorage", engine: "vLLM $VLLM", stages: []stage{
		{config: `{"sharedStoragePath":"$FOLDER"}`},
		{what: "a folder for each engine", reason: notShared, broken: decode,
			swap: []string{"$FOLDER", "$FOLDER-decode"}},
	}},
	{connector: "multi", engine: nixl + " and files", prefill: []string{"sideChannelPort=$PREFILL"},
		decode: []string{"sideChannelPort=$DECODE"}, stages: []stage{
			{config: `{"connectors":[{"type":"nixl"},{"type":"sharedstorage",` +
				`"config":{"sharedStoragePath":"$FOLDER"}}]}`},
			// http sends P first, too, so that a shared folder would still hold the KV when D looks.
			{what: "behind http, a folder for each engine", connector: "http", reason: behindHTTP.reason,
				broken: decode, swap: []string{"$FOLDER", "$FOLDER-decode"}},
		}},
	{connector: "mooncake", engine: "vLLM $VLLM with mooncake-transfer-engine $MOONCAKE", module: "mooncake_cpu",
		prefill: []string{"bootstrapPort=$PREFILL"}, decode: []string{"bootstrapPort=$DECODE"},
		stages: []stage{{orphan: true}, behindHTTP}},
	{connector: "mooncake-store", engine: "vLLM $VLLM with the master of mooncake-transfer-engine $MOONCAKE",
		module: "mooncake_store_cpu",
		beside: []string{"--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", "--metrics_port=$METRICS"},
		stages: []stage{
			{config: `{"master_server_address":"127.0.0.1:$MASTER","global_segment_size":"256MB",` +
				`"local_buffer_size":"128MB"}`},
			{what: "a master for each engine", reason: notShared, broken: decode,
				swap: []string{"$MASTER", "$MASTER2", "$METRICS", "$METRICS2"}},
		}},
	{connector: "offload-p2p", engine: nixl, module: "offload_cpu", prefill: []string{"p2pPort=$PREFILL"},
		decode: []string{"p2pPort=$DECODE"}, stages: []stage{
			{what: "together", config: `{"cpu_bytes_to_use":67108864}`, orphan: true},
			{what: "serial", config: `{"cpu_bytes_to_use":67108864,"dispatch":"serial"}`},
			{what: "decode without the tier", reason: "it has no secondary tier of type p2p", broken: decode,
				swap: []string{`[{"type":"p2p"}]`, `[]`}},
		}},
	// LMCache 0.5.6: a request without disagg_spec ends P, so D must serve alone. It drops what it has read, and
	// computes a prompt that it is asked for again. P keeps its connection to a D that is gone: to a new D at the same
	// address its writes fail until P is restarted, too.
	{connector: "lmcache-pd", engine: nixl + " and LMCache $LMCACHE", module: "lmcache_cpu", aloneOnD: true, both: true,
		decode: []string{"receiverInitPorts=$INIT", "receiverAllocPorts=$ALLOC"}, stages: []stage{
			{what: "retFirstTok", config: `{"notifyListen":"127.0.0.1:$NOTICES","notifyTimeout":"5s","chunk_size":64,` +
				`"pd_buffer_size":67108864,"retFirstTok":true}`},
			{what: "without retFirstTok", config: `{"notifyListen":"127.0.0.1:$NOTICES","notifyTimeout":"5s",` +
				`"chunk_size":64,"pd_buffer_size":67108864}`},
			{what: "notices go elsewhere", reason: "the prefill engine's notice did not come", broken: "prefill",
				swap: []string{"pd_proxy_port: $NOTICES", "pd_proxy_port: $ELSEWHERE"}},
		}},
}
