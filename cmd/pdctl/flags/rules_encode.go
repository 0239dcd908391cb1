// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"path"
	"slices"
	"strings"
)

// takers are the engines that take embeddings from an encode stage.
func (g *model) takers() []*Engine {
	return slices.DeleteFunc(slices.Clone(g.engines),
		func(e *Engine) bool { return e.Encoder == nil || e.Encoder.Role == "ec_producer" })
}

func encoderPath(e *Engine) string {
	if p := text(e.Encoder.Extra, "shared_storage_path"); p != "" {
		return path.Clean(p)
	}
	return "/tmp"
}

var encodeRules = []rule{
	{
		code: "encode-alone", severity: Error,
		remedy: "start prefill engines with --ec-transfer-config too, with ec_role ec_consumer",
		find: func(g *model) []hit {
			if len(g.encodes) == 0 || len(g.engines) == 0 || len(g.takers()) > 0 {
				return nil
			}
			return []hit{{engines: g.encodes,
				text: "encode media that no other engine takes over: each item is encoded twice"}}
		},
	},
	{
		code: "encode-differs", severity: Error, remedy: "write the same ec_connector for all of them",
		find: func(g *model) []hit {
			all := slices.Concat(g.encodes, g.takers())
			if len(g.encodes) > 0 && differ(all, func(e *Engine) string { return e.Encoder.Class }) {
				return []hit{{engines: all, text: "pass embeddings on in different ways (ec_connector)"}}
			}
			return nil
		},
	},
	{
		code: "encode-path-differs", severity: Error, remedy: "write the same shared_storage_path for all of them",
		find: func(g *model) []hit {
			all := g.encodeFolders()
			if len(g.encodes) > 0 && len(all) > 0 && differ(all, encoderPath) {
				return []hit{{engines: all,
					text: "keep embeddings in different folders (ec_connector_extra_config.shared_storage_path): " +
						"none finds the other's"}}
			}
			return nil
		},
	},
	{
		code: "encode-path-local", severity: Error, remedy: "write a folder that all machines mount",
		find: func(g *model) []hit {
			all := g.encodeFolders()
			local := func(e *Engine) bool {
				p := encoderPath(e)
				return !path.IsAbs(p) || p == "/tmp" || strings.HasPrefix(p, "/tmp/") ||
					strings.HasPrefix(p, "/dev/shm")
			}
			if len(g.encodes) == 0 || !apart(all) || !slices.ContainsFunc(all, local) {
				return nil
			}
			return []hit{{engines: all,
				text: "keep embeddings in a folder of each machine's own (shared_storage_path under /tmp, or " +
					"relative): none finds the other's"}}
		},
	},
	{
		code: "encode-loopback", severity: Error,
		remedy: "set VLLM_EC_SIDE_CHANNEL_HOST to an address of the engine's own machine that prefill engines reach",
		find: func(g *model) (hits []hit) {
			if !apart(slices.Concat(g.encodes, g.takers())) {
				return nil
			}
			for _, e := range g.encodes {
				if e.Encoder.Class == "ECCPUConnector" && yes(e.Encoder.Extra, "ec_enable_nixl") &&
					isLoopback(e.env["VLLM_EC_SIDE_CHANNEL_HOST"]) {
					hits = append(hits, hit{engines: []*Engine{e},
						text: "listens on its own machine's loopback only: prefill engines elsewhere cannot fetch " +
							"its embeddings"})
				}
			}
			return hits
		},
	},
}

// encodeFolders are the engines that pass on embeddings in a folder.
func (g *model) encodeFolders() []*Engine {
	return slices.DeleteFunc(slices.Concat(g.encodes, g.takers()),
		func(e *Engine) bool { return e.Encoder.Class != "ECExampleConnector" })
}
