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

// lmcache returns the engines with LMCache inside the process: those with enable_pd if pd is true, otherwise the
// others.
func (g *model) lmcache(pd bool) []side {
	return slices.DeleteFunc(g.with("LMCacheConnectorV1", "LMCacheConnector"),
		func(s side) bool { return isPD(s.Engine) != pd })
}

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
	{
		code: "lmcache-not-shared", severity: Error,
		remedy: "set LMCache's remote_url to one server of all engines (lm://HOST:PORT, redis://HOST:PORT), or use " +
			"LMCacheMPConnector with one server",
		find: func(g *model) []hit {
			if !g.pair() {
				return nil
			}
			return alone(g.lmcache(false),
				"keeps LMCache's chunks in its own memory only (no remote_url): the other side never finds them, "+
					"responses are 200 and every prompt is computed twice",
				func(s side) bool { return !sharesStore(s.Engine) })
		},
	},
	{
		code: "lmcache-remote-differs", severity: Error, remedy: "write the same remote_url for all engines",
		find: func(g *model) []hit {
			sides := slices.DeleteFunc(g.lmcache(false),
				func(s side) bool { return text(s.LMCache, "remote_url") == "" })
			if len(sides) > 0 && differ(sides, func(s side) string { return text(s.LMCache, "remote_url") }) {
				return []hit{{engines: enginesOf(sides),
					text: "store to different remote_urls: none finds the other's chunks"}}
			}
			return nil
		},
	},
	lmcacheDiffers("lmcache-chunk-size-differs", "chunk_size",
		"cut prompts into chunks of different sizes: their keys never match"),
	lmcacheDiffers("lmcache-serde-differs", "remote_serde",
		"write chunks in different forms: one cannot read the other's"),
	{
		code: "lmcache-tp-differs", severity: Error, remedy: "give all engines the same --tensor-parallel-size",
		find: func(g *model) []hit {
			sides := g.lmcache(false)
			if g.pair() && len(sides) > 0 && differ(sides, func(s side) string { return strconv.Itoa(s.TP) }) &&
				!slices.ContainsFunc(g.engines, isMLA) {
				return []hit{{engines: enginesOf(sides),
					text: "have different tensor parallel sizes, which are part of LMCache's keys: none finds the " +
						"other's chunks"}}
			}
			return nil
		},
	},
	{
		code: "lmcache-rpc-port-twice", severity: Error,
		remedy: "give each engine of a machine its own lmcache_rpc_port",
		find: func(g *model) []hit {
			var hits []hit
			sides := g.with("LMCacheConnectorV1", "LMCacheConnector")
			for i, a := range sides {
				for _, b := range sides[i+1:] {
					// It is the name of a socket, so it need not be a number. Without one it is 0
					// (lmcache/v1/lookup_client).
					if a.Engine != b.Engine && a.Node != "" && a.Node == b.Node &&
						text(a.t.Extra, "lmcache_rpc_port") == text(b.t.Extra, "lmcache_rpc_port") {
						hits = append(hits, hit{engines: []*Engine{a.Engine, b.Engine},
							text: "have the same lmcache_rpc_port on one machine: one answers the other's lookups"})
					}
				}
			}
			return hits
		},
	},
	{
		code: "lmcache-pd-behind-lmcache", severity: Error,
		remedy: "write kvConnector.type: lmcache-pd, with the receivers' ports among the decode endpoints' attributes",
		find: func(g *model) []hit {
			if g.typ == "" || g.typ == "lmcache-pd" || g.typ == "multi" { // whose children may have one
				return nil
			}
			return alone(g.lmcache(true),
				"is set up for LMCache's transfer from engine to engine (enable_pd), and the gateway's connector "+
					g.typ+
					" names no receiver: the first request ends the prefill engine", func(side) bool { return true })
		},
	},
	{
		code: "lmcache-store-behind-pd", severity: Error,
		remedy: "write kvConnector.type: lmcache, or enable_pd on the engines",
		find: func(g *model) []hit {
			if g.typ != "lmcache-pd" {
				return nil
			}
			return alone(g.lmcache(false),
				"is not set up for LMCache's transfer from engine to engine (no enable_pd): the gateway waits for a "+
					"notice that never comes",
				func(s side) bool { return len(s.Unread) == 0 })
		},
	},
	{
		code: "lmcache-notice-skipped", severity: Error,
		remedy: "remove pd_skip_proxy_notification, and set pd_proxy_host and pd_proxy_port to the gateway's " +
			"notifyListen",
		find: func(g *model) []hit {
			return alone(g.lmcache(true),
				"tells nobody when its KV has arrived (pd_skip_proxy_notification): decode starts on memory that is "+
					"not written yet, and answers from stale bytes or fails",
				func(s side) bool { return yes(s.LMCache, "pd_skip_proxy_notification") })
		},
	},
	{
		code: "lmcache-no-notice-address", severity: Error,
		remedy: "set pd_proxy_host and pd_proxy_port to the gateway's notifyListen",
		find: func(g *model) []hit {
			return alone(g.lmcache(true),
				"sends KV without an address for its notices (pd_proxy_host, pd_proxy_port): it does not start, or "+
					"the gateway waits in vain", func(s side) bool {
					if yes(s.LMCache, "pd_skip_proxy_notification") || pdRole(s.Engine) != "sender" ||
						yes(s.LMCache, "enable_nixl") {
						return false
					}
					return text(s.LMCache, "pd_proxy_host") == "" || text(s.LMCache, "pd_proxy_port") == ""
				})
		},
	},
	{
		code: "lmcache-notice-port", severity: Error,
		remedy: "write the port of the gateway's notifyListen as pd_proxy_port",
		find: func(g *model) []hit {
			if g.typ != "lmcache-pd" {
				return nil
			}
			listens := "8500"
			if _, port, err := net.SplitHostPort(text(g.config, "notifyListen")); err == nil {
				listens = port
			}
			return alone(g.lmcache(true),
				"sends its notices to another port than the gateway's "+listens+
					": each request waits for its notice in vain", func(s side) bool {
					port := text(s.LMCache, "pd_proxy_port")
					return pdRole(s.Engine) == "sender" && port != "" && port != listens
				})
		},
	},
	{
		code: "lmcache-notice-loopback", severity: Error,
		remedy: "set pd_proxy_host to an address of the gateway that prefill engines reach",
		find: func(g *model) []hit {
			if !apart(g.engines) {
				return nil
			}
			return alone(g.lmcache(true),
				"sends its notices to its own machine (pd_proxy_host is loopback), and the engines run on several",
				func(s side) bool {
					return text(s.LMCache, "pd_proxy_host") != "" && isLoopback(text(s.LMCache, "pd_proxy_host"))
				})
		},
	},
	{
		code: "lmcache-pd-role", severity: Error,
		remedy: `write pd_role "sender" with kv_producer and "receiver" with kv_consumer`,
		find: func(g *model) []hit {
			return alone(g.lmcache(true), "has a pd_role that does not fit its kv_role", func(s side) bool {
				switch pdRole(s.Engine) {
				case "sender":
					return !s.Role.Has(prefill)
				case "receiver":
					return !s.Role.Has(decode)
				}
				return true
			})
		},
	},
	{
		code: "lmcache-pd-receiver", severity: Error,
		remedy: "set pd_peer_host, and one pd_peer_init_port and pd_peer_alloc_port for each tensor parallel rank",
		find: func(g *model) []hit {
			return alone(g.lmcache(true),
				"receives KV without an address, or with another number of ports than tensor parallel ranks",
				func(s side) bool {
					if pdRole(s.Engine) != "receiver" || yes(s.LMCache, "enable_nixl") {
						return false
					}
					return text(s.LMCache, "pd_peer_host") == "" || count(s.LMCache, "pd_peer_init_port") != s.TP ||
						count(s.LMCache, "pd_peer_alloc_port") != s.TP
				})
		},
	},
	{
		code: "lmcache-pd-buffer", severity: Error,
		remedy: "set pd_buffer_size (bytes) and pd_buffer_device (cpu or cuda)",
		find: func(g *model) []hit {
			return alone(g.lmcache(true), "has no buffer for LMCache's transfer", func(s side) bool {
				return !yes(s.LMCache, "enable_nixl") &&
					(text(s.LMCache, "pd_buffer_size") == "" || text(s.LMCache, "pd_buffer_device") == "")
			})
		},
	},
	{
		code: "lmcache-pd-forbidden", severity: Error, remedy: "remove remote_url, save_decode_cache and enable_p2p",
		find: func(g *model) []hit {
			return alone(g.lmcache(true),
				"combines enable_pd with a setting that it excludes (remote_url, save_decode_cache, enable_p2p): it "+
					"does not start", func(s side) bool {
					return text(s.LMCache, "remote_url") != "" || yes(s.LMCache, "save_decode_cache") ||
						yes(s.LMCache, "enable_p2p")
				})
		},
	},
	{
		code: "lmcache-pd-partial-chunks", severity: Error,
		remedy: `write "discard_partial_chunks":false in kv_connector_extra_config`,
		find: func(g *model) []hit {
			return alone(g.lmcache(true),
				"throws the last, partial chunk of each prompt away (discard_partial_chunks): short prompts send "+
					"nothing, and their notice never comes",
				func(s side) bool { return yes(s.t.Extra, "discard_partial_chunks") })
		},
	},
	{
		code: "lmcache-old-names", severity: Warning,
		remedy: "write enable_pd, pd_role, pd_peer_host, pd_peer_init_port and pd_peer_alloc_port",
		find: func(g *model) []hit {
			return alone(g.lmcache(true),
				"uses LMCache's old names (enable_nixl, nixl_role), which later releases no longer read",
				func(s side) bool {
					return yes(s.LMCache, "enable_nixl") && !yes(s.LMCache, "enable_pd")
				})
		},
	},
	{
		code: "lmcache-mp-server", severity: Error,
		remedy: "give all engines the same lmcache.mp.host and lmcache.mp.port",
		find: func(g *model) []hit {
			sides := g.with("LMCacheMPConnector")
			// beside NIXL each engine has its own server
			if !g.pair() || len(sides) == 0 || len(g.with(nixlClasses...)) > 0 {
				return nil
			}
			server := func(s side) string {
				return text(s.t.Extra, "lmcache.mp.host") + ":" + text(s.t.Extra, "lmcache.mp.port")
			}
			local := slices.ContainsFunc(sides,
				func(s side) bool { return isLoopback(trimScheme(text(s.t.Extra, "lmcache.mp.host"))) })
			if differ(sides, server) || local && apart(enginesOf(sides)) {
				return []hit{{engines: enginesOf(sides),
					text: "speak with different LMCache servers: none finds the other's chunks"}}
			}
			return nil
		},
	},
}

func lmcacheDiffers(code, key, what string) rule {
	return rule{
		code: code, severity: Error, remedy: "write the same " + key + " for all engines",
		find: func(g *model) []hit {
			sides := slices.DeleteFunc(g.with("LMCacheConnectorV1", "LMCacheConnector"),
				func(s side) bool { return len(s.Unread) > 0 })
			if len(sides) > 0 && differ(sides, func(s side) string { return text(s.LMCache, key) }) {
				return []hit{{engines: enginesOf(sides), text: what}}
			}
			return nil
		},
	}
}
