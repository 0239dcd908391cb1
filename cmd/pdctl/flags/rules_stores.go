// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"net"
	"path"
	"slices"
	"strings"
)

func trimScheme(s string) string {
	if _, rest, ok := strings.Cut(s, "://"); ok {
		return rest
	}
	return s
}

// hashed are the connectors that find KV by hashes that depend on Python's hash seed.
func (g *model) hashed() []side {
	return slices.DeleteFunc(g.with("LMCacheConnectorV1", "LMCacheConnector", "MooncakeStoreConnector",
		"OffloadingConnector"), func(s side) bool {
		return s.t.Class == "OffloadingConnector" && p2pTier(s.t) == nil
	})
}

// p2pTier returns the settings of an OffloadingConnector's tier between engines, or nil if there is none.
func p2pTier(t *Transfer) map[string]any {
	tiers, _ := t.Extra["secondary_tiers"].([]any)
	for _, tier := range tiers {
		if m, ok := tier.(map[string]any); ok && text(m, "type") == "p2p" {
			return m
		}
	}
	return nil
}

var storeRules = []rule{
	{
		code: "hash-seed-missing", severity: Error, remedy: "set PYTHONHASHSEED=0 for all engines",
		find: func(g *model) []hit {
			if !g.pair() {
				return nil
			}
			return alone(g.hashed(),
				"has no PYTHONHASHSEED: its hashes of prompts differ at each start, and no engine finds another's KV",
				func(s side) bool {
					seed := s.env["PYTHONHASHSEED"]
					return seed == "" || seed == "random"
				})
		},
	},
	{
		code: "hash-seed-differs", severity: Error, remedy: "set the same PYTHONHASHSEED for all engines",
		find: func(g *model) []hit {
			sides := slices.DeleteFunc(g.hashed(), func(s side) bool { return s.env["PYTHONHASHSEED"] == "" })
			if len(sides) > 0 && differ(sides, func(s side) string { return s.env["PYTHONHASHSEED"] }) {
				return []hit{{engines: enginesOf(sides),
					text: "have different PYTHONHASHSEEDs: none finds another's KV"}}
			}
			return nil
		},
	},
	{
		code: "hash-algorithm-differs", severity: Error,
		remedy: "write the same --prefix-caching-hash-algo for all engines",
		find: func(g *model) []hit {
			sides := g.hashed()
			if len(sides) > 0 && differ(sides, func(s side) string { return s.args["prefix-caching-hash-algo"] }) {
				return []hit{{engines: enginesOf(sides),
					text: "hash prompts in different ways (--prefix-caching-hash-algo): none finds another's KV"}}
			}
			return nil
		},
	},
	{
		code: "storage-path-differs", severity: Error, remedy: "write the same shared_storage_path for all engines",
		find: func(g *model) []hit {
			sides := g.with("ExampleConnector", "SharedStorageConnector")
			if len(sides) > 0 && differ(sides, storagePath) {
				return []hit{{engines: enginesOf(sides),
					text: "keep KV in different folders (shared_storage_path): none finds the other's"}}
			}
			return nil
		},
	},
	{
		code: "storage-path-local", severity: Error, remedy: "write a folder that all machines mount",
		find: func(g *model) []hit {
			sides := g.with("ExampleConnector", "SharedStorageConnector")
			local := func(s side) bool {
				p := storagePath(s)
				return !path.IsAbs(p) || p == "/tmp" || strings.HasPrefix(p, "/tmp/") ||
					strings.HasPrefix(p, "/dev/shm")
			}
			if !apart(enginesOf(sides)) || !slices.ContainsFunc(sides, local) {
				return nil
			}
			return []hit{{engines: enginesOf(sides),
				text: "keep KV in a folder of each machine's own (shared_storage_path under /tmp, or relative): none " +
					"finds the other's"}}
		},
	},
}

func storagePath(s side) string {
	p := text(s.t.Extra, "shared_storage_path")
	if p == "" {
		return "/tmp"
	}
	return path.Clean(p)
}

var mooncakeRules = []rule{
	mooncakeDiffers("mooncake-master-differs", "master_server_address",
		"store to different Mooncake masters: none finds the other's KV"),
	mooncakeDiffers("mooncake-tenant-differs", "tenant_id",
		"store for different tenants of Mooncake: none finds the other's KV"),
	{
		code: "mooncake-master-loopback", severity: Error,
		remedy: "write the master's address as all machines reach it",
		find: func(g *model) []hit {
			sides := g.with("MooncakeStoreConnector")
			if !apart(enginesOf(sides)) {
				return nil
			}
			return alone(sides, "looks for Mooncake's master on its own machine, and the engines run on several",
				func(s side) bool {
					master := text(s.Mooncake, "master_server_address")
					host, _, err := net.SplitHostPort(master)
					return master != "" && err == nil && isLoopback(host)
				})
		},
	},
	{
		code: "mooncake-prefix-differs", severity: Error, remedy: "write the same cache_prefix for all engines",
		find: func(g *model) []hit {
			sides := g.with("MooncakeStoreConnector")
			if len(sides) > 0 && differ(sides, func(s side) string { return text(s.t.Extra, "cache_prefix") }) {
				return []hit{{engines: enginesOf(sides),
					text: "put different prefixes before their keys (cache_prefix): none finds the other's KV"}}
			}
			return nil
		},
	},
	{
		code: "mooncake-port-twice", severity: Error,
		remedy: "give each prefill engine of a machine its own VLLM_MOONCAKE_BOOTSTRAP_PORT",
		find: func(g *model) []hit {
			var ports []taken
			for _, s := range g.with("MooncakeConnector") {
				if s.Role.Has(prefill) && text(s.t.Extra, "bootstrap_server_address") == "" {
					p := bootstrapPort(s)
					ports = append(ports, taken{s.Engine, p, p + 1})
				}
			}
			return clashes(ports, "open their bootstrap server on the same port of one machine")
		},
	},
	{
		code: "mooncake-port-gateway", severity: Warning,
		remedy: "write config.bootstrapPort, or the endpoint's attribute bootstrapPort, as the engine's " +
			"VLLM_MOONCAKE_BOOTSTRAP_PORT",
		find: func(g *model) []hit {
			asked := int(number(text(g.config, "bootstrapPort"), 8998))
			if g.typ != "mooncake" {
				return nil
			}
			return alone(g.with("MooncakeConnector"),
				fmt.Sprintf("opens its bootstrap server on another port than the gateway asks (%d), unless the "+
					"endpoint's attribute says so", asked), func(s side) bool {
					return s.Role.Has(prefill) && bootstrapPort(s) != asked &&
						text(s.t.Extra, "bootstrap_server_address") == ""
				})
		},
	},
	{
		code: "mooncake-protocol-differs", severity: Error, remedy: "write the same mooncake_protocol for all engines",
		find: func(g *model) []hit {
			sides := g.with("MooncakeConnector")
			protocol := func(s side) string {
				if p := text(s.t.Extra, "mooncake_protocol"); p != "" {
					return p
				}
				return "rdma"
			}
			if len(sides) > 0 && differ(sides, protocol) {
				return []hit{{engines: enginesOf(sides),
					text: "move KV over different transports (mooncake_protocol, default rdma)"}}
			}
			return nil
		},
	},
}

func mooncakeDiffers(code, key, what string) rule {
	return rule{
		code: code, severity: Error, remedy: "write the same " + key + " for all engines",
		find: func(g *model) []hit {
			sides := slices.DeleteFunc(g.with("MooncakeStoreConnector"), func(s side) bool { return len(s.Unread) > 0 })
			if len(sides) > 0 && differ(sides, func(s side) string { return text(s.Mooncake, key) }) {
				return []hit{{engines: enginesOf(sides), text: what}}
			}
			return nil
		},
	}
}

func bootstrapPort(s side) int { return int(number(s.env["VLLM_MOONCAKE_BOOTSTRAP_PORT"], 8998)) }
