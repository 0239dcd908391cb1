// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"net"
	"slices"
	"strconv"
)

// isPD reports whether LMCache sends KV from engine to engine, by its new settings or its old ones.
func isPD(e *Engine) bool { return yes(e.LMCache, "enable_pd") || yes(e.LMCache, "enable_nixl") }

func pdRole(e *Engine) string {
	if r := text(e.LMCache, "pd_role"); r != "" {
		return r
	}
	return text(e.LMCache, "nixl_role")
}

// inProcess are the engines with LMCache inside the process; pdEngines those with enable_pd, storeEngines the others.
var (
	inProcess    = speaking("LMCacheConnectorV1", "LMCacheConnector")
	pdEngines    = only(inProcess, func(s side) bool { return isPD(s.Engine) })
	storeEngines = only(inProcess, func(s side) bool { return !isPD(s.Engine) })
)

// sharedBy are settings by which engines find each other's chunks.
var sharedBy = []string{"remote_url", "gds_path", "weka_path", "external_backends", "remote_storage_plugins",
	"storage_plugins"}

func sharesStore(e *Engine) bool {
	if yes(e.LMCache, "enable_p2p") {
		return true
	}
	for _, key := range sharedBy {
		if v, given := e.LMCache[key]; given && v != nil && v != "" {
			return true
		}
	}
	return len(e.Unread) > 0 // an unread file may have one
}

var lmcacheRules = []rule{
	{code: "lmcache-not-shared", severity: Error, when: (*model).pair, among: storeEngines,
		bad: func(s side) bool { return !sharesStore(s.Engine) },
		text: "keeps LMCache's chunks in its own memory only (no remote_url): the other side never finds them, " +
			"responses are 200 and every prompt is computed twice",
		remedy: "set LMCache's remote_url to one server of all engines (lm://HOST:PORT, redis://HOST:PORT), or use " +
			"LMCacheMPConnector with one server"},
	{code: "lmcache-remote-differs", severity: Error,
		among:  only(storeEngines, func(s side) bool { return text(s.LMCache, "remote_url") != "" }),
		equal:  func(s side) string { return text(s.LMCache, "remote_url") },
		text:   "store to different remote_urls: none finds the other's chunks",
		remedy: "write the same remote_url for all engines"},
	lmcacheDiffers("lmcache-chunk-size-differs", "chunk_size",
		"cut prompts into chunks of different sizes: their keys never match"),
	lmcacheDiffers("lmcache-serde-differs", "remote_serde",
		"write chunks in different forms: one cannot read the other's"),
	{code: "lmcache-tp-differs", severity: Error, among: storeEngines,
		when:   func(g *model) bool { return g.pair() && !slices.ContainsFunc(g.engines, isMLA) },
		equal:  func(s side) string { return strconv.Itoa(s.TP) },
		text:   "have different tensor parallel sizes, which are part of LMCache's keys: none finds the other's chunks",
		remedy: "give all engines the same --tensor-parallel-size"},
	{code: "lmcache-rpc-port-twice", severity: Error, among: inProcess,
		clash: func(a, b side) bool {
			// It is the name of a socket, so it need not be a number. Without one it is 0 (lmcache/v1/lookup_client).
			return a.Engine != b.Engine && a.Node != "" && a.Node == b.Node &&
				text(a.t.Extra, "lmcache_rpc_port") == text(b.t.Extra, "lmcache_rpc_port")
		},
		text:   "have the same lmcache_rpc_port on one machine: one answers the other's lookups",
		remedy: "give each engine of a machine its own lmcache_rpc_port"},
	{code: "lmcache-pd-behind-lmcache", severity: Error,
		when: func(g *model) bool { // a child of multi may have one
			return g.typ != "" && g.typ != "lmcache-pd" && g.typ != "multi"
		},
		find: func(g *model) []hit {
			return alone(pdEngines(g), "is set up for LMCache's transfer from engine to engine (enable_pd), and the "+
				"gateway's connector "+g.typ+" names no receiver: the first request ends the prefill engine",
				func(side) bool { return true })
		},
		remedy: "write kvConnector.type: lmcache-pd, with the receivers' ports among the decode endpoints' attributes"},
	{code: "lmcache-store-behind-pd", severity: Error, when: behind("lmcache-pd"), among: storeEngines,
		bad: func(s side) bool { return len(s.Unread) == 0 },
		text: "is not set up for LMCache's transfer from engine to engine (no enable_pd): the gateway waits for a " +
			"notice that never comes",
		remedy: "write kvConnector.type: lmcache, or enable_pd on the engines"},
	{code: "lmcache-notice-skipped", severity: Error, among: pdEngines,
		bad: func(s side) bool { return yes(s.LMCache, "pd_skip_proxy_notification") },
		text: "tells nobody when its KV has arrived (pd_skip_proxy_notification): decode starts on memory that is " +
			"not written yet, and answers from stale bytes or fails",
		remedy: "remove pd_skip_proxy_notification, and set pd_proxy_host and pd_proxy_port to the gateway's " +
			"notifyListen"},
	{code: "lmcache-no-notice-address", severity: Error, among: pdEngines,
		bad: func(s side) bool {
			return !yes(s.LMCache, "pd_skip_proxy_notification") && pdRole(s.Engine) == "sender" &&
				lacks(s, "pd_proxy_host", "pd_proxy_port")
		},
		text: "sends KV without an address for its notices (pd_proxy_host, pd_proxy_port): it does not start, or the " +
			"gateway waits in vain",
		remedy: "set pd_proxy_host and pd_proxy_port to the gateway's notifyListen"},
	{code: "lmcache-notice-port", severity: Error, when: behind("lmcache-pd"),
		find: func(g *model) []hit {
			listens := "8500"
			if _, port, err := net.SplitHostPort(text(g.config, "notifyListen")); err == nil {
				listens = port
			}
			return alone(pdEngines(g), "sends its notices to another port than the gateway's "+listens+
				": each request waits for its notice in vain", func(s side) bool {
				port := text(s.LMCache, "pd_proxy_port")
				return pdRole(s.Engine) == "sender" && port != "" && port != listens
			})
		},
		remedy: "write the port of the gateway's notifyListen as pd_proxy_port"},
	{code: "lmcache-notice-loopback", severity: Error, among: pdEngines,
		when: func(g *model) bool { return apart(g.engines) },
		bad: func(s side) bool {
			host := text(s.LMCache, "pd_proxy_host")
			return host != "" && isLoopback(host)
		},
		text:   "sends its notices to its own machine (pd_proxy_host is loopback), and the engines run on several",
		remedy: "set pd_proxy_host to an address of the gateway that prefill engines reach"},
	{code: "lmcache-pd-role", severity: Error, among: pdEngines,
		bad: func(s side) bool {
			switch pdRole(s.Engine) {
			case "sender":
				return !s.Role.Has(prefill)
			case "receiver":
				return !s.Role.Has(decode)
			}
			return true
		},
		text:   "has a pd_role that does not fit its kv_role",
		remedy: `write pd_role "sender" with kv_producer and "receiver" with kv_consumer`},
	{code: "lmcache-pd-receiver", severity: Error, among: pdEngines,
		bad: func(s side) bool {
			return pdRole(s.Engine) == "receiver" && !yes(s.LMCache, "enable_nixl") &&
				(text(s.LMCache, "pd_peer_host") == "" || count(s.LMCache, "pd_peer_init_port") != s.TP ||
					count(s.LMCache, "pd_peer_alloc_port") != s.TP)
		},
		text:   "receives KV without an address, or with another number of ports than tensor parallel ranks",
		remedy: "set pd_peer_host, and one pd_peer_init_port and pd_peer_alloc_port for each tensor parallel rank"},
	{code: "lmcache-pd-buffer", severity: Error, among: pdEngines,
		bad:    func(s side) bool { return lacks(s, "pd_buffer_size", "pd_buffer_device") },
		text:   "has no buffer for LMCache's transfer",
		remedy: "set pd_buffer_size (bytes) and pd_buffer_device (cpu or cuda)"},
	{code: "lmcache-pd-forbidden", severity: Error, among: pdEngines,
		bad: func(s side) bool {
			return text(s.LMCache, "remote_url") != "" || yes(s.LMCache, "save_decode_cache") ||
				yes(s.LMCache, "enable_p2p")
		},
		text: "combines enable_pd with a setting that it excludes (remote_url, save_decode_cache, enable_p2p): it " +
			"does not start",
		remedy: "remove remote_url, save_decode_cache and enable_p2p"},
	{code: "lmcache-pd-partial-chunks", severity: Error, among: pdEngines,
		bad: func(s side) bool { return yes(s.t.Extra, "discard_partial_chunks") },
		text: "throws the last, partial chunk of each prompt away (discard_partial_chunks): short prompts send " +
			"nothing, and their notice never comes",
		remedy: `write "discard_partial_chunks":false in kv_connector_extra_config`},
	{code: "lmcache-old-names", severity: Warning, among: pdEngines,
		bad:    func(s side) bool { return yes(s.LMCache, "enable_nixl") && !yes(s.LMCache, "enable_pd") },
		text:   "uses LMCache's old names (enable_nixl, nixl_role), which later releases no longer read",
		remedy: "write enable_pd, pd_role, pd_peer_host, pd_peer_init_port and pd_peer_alloc_port"},
	{code: "lmcache-mp-server", severity: Error,
		when: func(g *model) bool { // beside NIXL each engine has its own server
			return g.pair() && len(g.with(nixlClasses...)) == 0
		},
		find: func(g *model) []hit {
			sides := g.with("LMCacheMPConnector")
			server := func(s side) string {
				return text(s.t.Extra, "lmcache.mp.host") + ":" + text(s.t.Extra, "lmcache.mp.port")
			}
			local := slices.ContainsFunc(sides,
				func(s side) bool { return isLoopback(trimScheme(text(s.t.Extra, "lmcache.mp.host"))) })
			if differ(sides, server) || local && apart(enginesOf(sides)) {
				return asOne(sides)
			}
			return nil
		},
		text:   "speak with different LMCache servers: none finds the other's chunks",
		remedy: "give all engines the same lmcache.mp.host and lmcache.mp.port"},
}

// lacks reports whether one of LMCache's settings of today's names is missing. The old names have others for all of
// them.
func lacks(s side, names ...string) bool {
	return !yes(s.LMCache, "enable_nixl") &&
		slices.ContainsFunc(names, func(name string) bool { return text(s.LMCache, name) == "" })
}

func lmcacheDiffers(code, key, what string) rule {
	return rule{code: code, severity: Error, text: what, remedy: "write the same " + key + " for all engines",
		among: only(inProcess, func(s side) bool { return len(s.Unread) == 0 }),
		equal: func(s side) string { return text(s.LMCache, key) }}
}
