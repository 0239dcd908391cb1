// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"cmp"
	"fmt"
	"net"
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
func hashed(g *model) []side {
	return slices.DeleteFunc(g.with("LMCacheConnectorV1", "LMCacheConnector", "MooncakeStoreConnector",
		"OffloadingConnector"), func(s side) bool {
		return s.t.Class == "OffloadingConnector" && p2pTier(s.t) == nil
	})
}

func hashSeed(s side) string { return s.env["PYTHONHASHSEED"] }

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

// tiered are the OffloadingConnectors with a tier between engines.
var tiered = only(speaking("OffloadingConnector"), func(s side) bool { return p2pTier(s.t) != nil })

// folderClasses are the names of the connector that keeps KV in a folder.
var folderClasses = []string{"ExampleConnector", "SharedStorageConnector"}

func storagePath(s side) string { return folder(s.t.Extra) }

var storeRules = []rule{
	{code: "hash-seed-missing", severity: Error, when: (*model).pair, among: hashed,
		bad:    func(s side) bool { return hashSeed(s) == "" || hashSeed(s) == "random" },
		text:   "has no PYTHONHASHSEED: its hashes of prompts differ at each start, and no engine finds another's KV",
		remedy: "set PYTHONHASHSEED=0 for all engines"},
	{code: "hash-seed-differs", severity: Error, equal: hashSeed,
		among:  only(hashed, func(s side) bool { return hashSeed(s) != "" }),
		text:   "have different PYTHONHASHSEEDs: none finds another's KV",
		remedy: "set the same PYTHONHASHSEED for all engines"},
	{code: "hash-algorithm-differs", severity: Error, among: hashed,
		equal:  func(s side) string { return s.args["prefix-caching-hash-algo"] },
		text:   "hash prompts in different ways (--prefix-caching-hash-algo): none finds another's KV",
		remedy: "write the same --prefix-caching-hash-algo for all engines"},
	{code: "storage-path-differs", severity: Error, among: speaking(folderClasses...), equal: storagePath,
		text:   "keep KV in different folders (shared_storage_path): none finds the other's",
		remedy: "write the same shared_storage_path for all engines"},
	{code: "storage-path-local", severity: Error, find: unshared(speaking(folderClasses...), storagePath),
		text: "keep KV in a folder of each machine's own (shared_storage_path under /tmp, or relative): none finds " +
			"the other's",
		remedy: "write a folder that all machines mount"},
}

// mooncakeSources are prefill engines with a bootstrap server of their own.
var mooncakeSources = only(speaking("MooncakeConnector"), func(s side) bool {
	return s.Role.Has(prefill) && text(s.t.Extra, "bootstrap_server_address") == ""
})

func bootstrapPort(s side) int { return port(s.env["VLLM_MOONCAKE_BOOTSTRAP_PORT"], 8998) }

var mooncakeRules = []rule{
	mooncakeDiffers("mooncake-master-differs", "master_server_address",
		"store to different Mooncake masters: none finds the other's KV"),
	mooncakeDiffers("mooncake-tenant-differs", "tenant_id",
		"store for different tenants of Mooncake: none finds the other's KV"),
	{code: "mooncake-master-loopback", severity: Error, among: speaking("MooncakeStoreConnector"), apart: true,
		bad: func(s side) bool {
			host, _, err := net.SplitHostPort(text(s.Mooncake, "master_server_address"))
			return err == nil && isLoopback(host)
		},
		text:   "looks for Mooncake's master on its own machine, and the engines run on several",
		remedy: "write the master's address as all machines reach it"},
	{code: "mooncake-prefix-differs", severity: Error, among: speaking("MooncakeStoreConnector"),
		equal:  func(s side) string { return text(s.t.Extra, "cache_prefix") },
		text:   "put different prefixes before their keys (cache_prefix): none finds the other's KV",
		remedy: "write the same cache_prefix for all engines"},
	{code: "mooncake-port-twice", severity: Error, among: mooncakeSources,
		clash:  samePort(func(s side) (int, int) { return bootstrapPort(s), 1 }),
		text:   "open their bootstrap server on the same port of one machine",
		remedy: "give each prefill engine of a machine its own VLLM_MOONCAKE_BOOTSTRAP_PORT"},
	{code: "mooncake-port-gateway", severity: Warning, when: behind("mooncake"),
		find: func(g *model) []hit {
			asked := port(text(g.config, "bootstrapPort"), 8998)
			return alone(mooncakeSources(g),
				fmt.Sprintf("opens its bootstrap server on another port than the gateway asks (%d), unless the "+
					"endpoint's attribute says so", asked), func(s side) bool { return bootstrapPort(s) != asked })
		},
		remedy: "write config.bootstrapPort, or the endpoint's attribute bootstrapPort, as the engine's " +
			"VLLM_MOONCAKE_BOOTSTRAP_PORT"},
	{code: "mooncake-protocol-differs", severity: Error, among: speaking("MooncakeConnector"),
		equal:  func(s side) string { return cmp.Or(text(s.t.Extra, "mooncake_protocol"), "rdma") },
		text:   "move KV over different transports (mooncake_protocol, default rdma)",
		remedy: "write the same mooncake_protocol for all engines"},
}

func mooncakeDiffers(code, key, what string) rule {
	return rule{code: code, severity: Error, text: what, remedy: "write the same " + key + " for all engines",
		among: only(speaking("MooncakeStoreConnector"), func(s side) bool { return len(s.Unread) == 0 }),
		equal: func(s side) string { return text(s.Mooncake, key) }}
}
