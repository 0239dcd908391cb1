// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/lab/internal/apis"
	"github.com/pdkit/pdkit/lab/internal/gateway"
)

// vllmAPIs are the APIs of vLLM and of its simulation.
var vllmAPIs = []*apis.API{apis.Completions, apis.Chat, apis.Responses, apis.Messages, apis.Generate}

// order is a connector whose two legs stand in an order of their own, with the engines that speak its protocol. Its
// name is also the model's.
type order struct {
	name     string
	legs     string         // for the report
	settings gateway.Object // kvConnector.config
	apis     []*apis.API
	role     [2]string // the engines' kv_role, of prefill and decode; empty: producer and consumer
	extra    map[string]string
	lone     string // the connector of the lone engine
	store    bool   // engines share a folder
	blocks   int    // of a decode engine; 0: the default of these runs
	// engines publish their KV-cache events
	publishes bool
}

// lease is how long the engines keep KV for another one. It is longer than prefill, the handoff's age and decode's
// first byte may take together (shortTimeouts), so that no response can rest on KV whose lease has ended, however long
// the network holds packets back. It is short, so that the end of the run can wait for all that nobody fetched.
const lease = 15 * time.Second

const leaseSeconds = "15"

func orders(callback string) []*order {
	return []*order{
		{name: "nixl", legs: "P, then D with P's handoff", apis: vllmAPIs,
			settings: gateway.Object{"leaseDuration": "15s"}},
		{name: "mooncake", legs: "both together; D asks P by a transfer id", apis: vllmAPIs,
			extra: map[string]string{"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": leaseSeconds}},
		{name: "sglang", legs: "both together; they meet in a room", lone: "sglang",
			apis: append(vllmAPIs[:4:4], apis.SGLang),
			extra: map[string]string{"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": leaseSeconds,
				"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": leaseSeconds}},
		{name: "sharedstorage", legs: "P, then D, which looks into a folder", apis: vllmAPIs, store: true,
			role: [2]string{enginesim.RoleBoth, enginesim.RoleBoth}},
		{name: "ascend-layerwise", legs: "D, which calls back, then P", apis: vllmAPIs,
			settings: gateway.Object{"callbackListen": callback},
			// a real D never lets go of blocks into which a lost P might still write: so it needs many
			blocks: 1 << 14},
	}
}

// Ports of an engine at its own address. Each move to new ports adds one.
const (
	portHTTP      = 8000
	portSide      = 5600
	portBootstrap = 8900
	portNotice    = 30000
	portEvents    = 20000 // of KV-cache events
	portReplay    = 21000
)

// engineConfig is the configuration of an engine of the order at an address. moves counts how often it has moved.
func (o *order) engineConfig(role, ip, dir string, moves int) enginesim.Config {
	cfg := enginesim.Config{
		Model: o.name, Connector: o.name, KVRole: enginesim.RoleProducer, Lease: lease, MaxModelLen: 8192,
		HandshakeTimeout: 2 * time.Second, PrefillRate: 40_000, ITL: 3 * time.Millisecond, KeepRequests: -1,
		Listen: join(ip, portHTTP+moves), SideChannel: join(ip, portSide+moves),
	}
	extra := map[string]string{}
	maps.Copy(extra, o.extra)
	side := 0
	if role == decode {
		cfg.KVRole, cfg.Blocks, side = enginesim.RoleConsumer, 512, 1
		if o.blocks > 0 {
			cfg.Blocks = o.blocks
		}
	}
	if o.role[side] != "" {
		cfg.KVRole = o.role[side]
	}
	switch o.name {
	case "mooncake":
		extra["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = strconv.Itoa(portBootstrap + moves)
	case "sglang":
		extra["disaggregation_bootstrap_port"] = strconv.Itoa(portBootstrap + moves)
	case "ascend-layerwise":
		extra["kv_port"] = strconv.Itoa(portNotice + moves)
	case "sharedstorage":
		extra["shared_storage_path"] = filepath.Join(dir, "store")
	}
	cfg.Extra = extra
	if o.publishes {
		cfg.KVEvents = &enginesim.KVEvents{Endpoint: join(ip, portEvents+moves), Replay: join(ip, portReplay+moves)}
	}
	return cfg
}

// loneConfig is an engine that serves the same requests alone, whose responses are the right ones.
func (o *order) loneConfig() enginesim.Config {
	cfg := enginesim.Config{Model: o.name, Connector: o.lone, KVRole: enginesim.RoleBoth, Blocks: 1 << 14,
		MaxModelLen: 8192, KeepRequests: -1}
	if o.lone == "" {
		cfg.Connector = "none"
	}
	return cfg
}

// attributes are what the connector must know of an engine's entry in discovery, as members of a YAML object.
func (o *order) attributes(e *engine) string {
	switch {
	case e.role == prefill && o.name == "mooncake":
		return fmt.Sprintf("bootstrapURL: %q", e.bootstrap())
	case e.role == prefill && o.name == "sglang":
		_, port, _ := net.SplitHostPort(strings.TrimPrefix(e.bootstrap(), "http://"))
		return fmt.Sprintf("bootstrapPort: %q", port)
	}
	return ""
}

func join(ip string, port int) string { return net.JoinHostPort(ip, strconv.Itoa(port)) }
