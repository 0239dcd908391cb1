// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"slices"
	"strconv"
)

// peerRules are the rules for protocols in which engines find each other by address.
var peerRules = []rule{
	{
		code: "nccl-tp-differs", severity: Error, remedy: "give all engines the same --tensor-parallel-size",
		find: func(g *model) []hit {
			sides := g.with("P2pNcclConnector", "PyNcclConnector")
			if len(sides) > 0 && differ(sides, func(s side) string { return strconv.Itoa(s.TP) }) {
				return []hit{{engines: enginesOf(sides),
					text: "have different tensor parallel sizes, which NCCL's connectors cannot bridge: requests hang"}}
			}
			return nil
		},
	},
	{
		code: "p2pnccl-request-ids", severity: Error,
		remedy: "set VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 on all engines",
		find: func(g *model) []hit {
			return alone(g.with("P2pNcclConnector"),
				"adds a random ending to request ids, in which P2pNccl keeps addresses and by which both sides match "+
					"(vLLM 0.14 and later): KV never arrives", func(s side) bool {
					return !s.Version.Before(0, 14) && s.env["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] != "1"
				})
		},
	},
	{
		code: "p2pnccl-port-twice", severity: Error,
		remedy: "give each engine of a machine its own kv_port, as far apart as its tensor parallel size",
		find: func(g *model) []hit {
			var ports []taken
			for _, s := range g.with("P2pNcclConnector") {
				from := int(number(s.t.Port, 14579))
				ports = append(ports, taken{s.Engine, from, from + s.TP})
			}
			return clashes(ports, "take the same kv_port on one machine")
		},
	},
	{
		code: "pynccl-ranks", severity: Error,
		remedy: "write kv_rank 0 for prefill, 1 for decode, and kv_parallel_size 2 for both",
		find: func(g *model) []hit {
			sides := g.with("PyNcclConnector")
			if len(sides) < 2 || differ(sides, func(s side) string { return s.t.Rank }) {
				return nil
			}
			return []hit{{engines: enginesOf(sides), text: "have the same kv_rank: they wait for each other for ever"}}
		},
	},
	{
		code: "moriio-mode-differs", severity: Error,
		remedy: "write the same read_mode for all engines, and mode: read or write in the gateway to match",
		find: func(g *model) []hit {
			sides := g.with("MoRIIOConnector")
			if len(sides) == 0 {
				return nil
			}
			mode := func(s side) string { return strconv.FormatBool(yes(s.t.Extra, "read_mode")) }
			if differ(sides, mode) {
				return []hit{{engines: enginesOf(sides), text: "disagree on who moves KV (read_mode)"}}
			}
			asked := text(g.config, "mode") == "read"
			if g.typ == "moriio" && asked != yes(sides[0].t.Extra, "read_mode") {
				return []hit{{engines: enginesOf(sides),
					text: "have another read_mode than the gateway's mode: requests hang, or run on KV that " +
						"nobody wrote"}}
			}
			return nil
		},
	},
	{
		code: "moriio-ports", severity: Error,
		remedy: "write http_port, handshake_port and notify_port in kv_connector_extra_config",
		find: func(g *model) []hit {
			return alone(g.with("MoRIIOConnector"), "lacks one of the ports that MoRIIO needs: it does not start",
				func(s side) bool {
					return slices.ContainsFunc([]string{"http_port", "handshake_port", "notify_port"},
						func(k string) bool { return text(s.t.Extra, k) == "" })
				})
		},
	},
	{
		code: "offload-p2p-missing", severity: Error,
		remedy: `add a secondary tier of type "p2p" to the OffloadingConnector's settings`,
		find: func(g *model) []hit {
			if g.typ != "offload-p2p" {
				return nil
			}
			return alone(g.with("OffloadingConnector"),
				"offloads KV without a tier between engines: it ignores what the gateway tells it, and computes "+
					"every prompt itself",
				func(s side) bool { return p2pTier(s.t) == nil })
		},
	},
	{
		code: "offload-old-keys", severity: Error, remedy: "use vLLM 0.28 or newer",
		find: func(g *model) []hit {
			if g.typ != "offload-p2p" {
				return nil
			}
			return alone(g.with("OffloadingConnector"),
				"knows the P2P tier's keys by older names (before July 2026): it ignores what the gateway tells it, "+
					"and computes every prompt itself",
				func(s side) bool { return p2pTier(s.t) != nil && s.Version.Before(0, 28) })
		},
	},
	{
		code: "offload-port-gateway", severity: Warning,
		remedy: "write config.port, or the endpoint's attribute p2pPort, as the engine's VLLM_P2P_SIDE_CHANNEL_PORT",
		find: func(g *model) []hit {
			if g.typ != "offload-p2p" {
				return nil
			}
			asked := int(number(text(g.config, "port"), 7777))
			var sources []*Engine // the prefill engines: decode engines may be kv_both, too, and listen elsewhere
			for _, s := range g.with("OffloadingConnector") {
				if !s.Role.Has(prefill) || p2pTier(s.t) == nil {
					continue
				}
				if int(number(p2pSetting(s, "port", "VLLM_P2P_SIDE_CHANNEL_PORT"), 5710)) == asked {
					return nil
				}
				sources = append(sources, s.Engine)
			}
			if len(sources) == 0 {
				return nil
			}
			return []hit{{engines: sources,
				text: fmt.Sprintf("all listen on other ports than the gateway tells decode (%d; the engine's own "+
					"default is 5710), unless the endpoints' attributes say so", asked)}}
		},
	},
	{
		code: "offload-loopback", severity: Error,
		remedy: "set VLLM_P2P_SIDE_CHANNEL_HOST to an address of the engine's own machine that the others reach",
		find: func(g *model) []hit {
			sides := slices.DeleteFunc(g.with("OffloadingConnector"), func(s side) bool { return p2pTier(s.t) == nil })
			if !apart(enginesOf(sides)) {
				return nil
			}
			return alone(sides, "listens on its own machine's loopback only: engines elsewhere cannot fetch its KV",
				func(s side) bool {
					host := p2pSetting(s, "host", "VLLM_P2P_SIDE_CHANNEL_HOST")
					return s.Role.Has(prefill) && isLoopback(host)
				})
		},
	},
	{
		code: "offload-port-twice", severity: Error,
		remedy: "give each engine of a machine its own VLLM_P2P_SIDE_CHANNEL_PORT, as far apart as its data " +
			"parallel size",
		find: func(g *model) []hit {
			var ports []taken
			for _, s := range g.with("OffloadingConnector") {
				if p2pTier(s.t) == nil {
					continue
				}
				from := int(number(p2pSetting(s, "port", "VLLM_P2P_SIDE_CHANNEL_PORT"), 5710))
				ports = append(ports, taken{s.Engine, from, from + s.DP})
			}
			return clashes(ports, "take the same control port on one machine")
		},
	},
}

// p2pSetting is a tier's own setting, or the value of the variable that is its default.
func p2pSetting(s side, key, variable string) string {
	if v := text(p2pTier(s.t), key); v != "" {
		return v
	}
	return s.env[variable]
}

var otherEngineRules = []rule{
	{
		code: "sglang-mode", severity: Error, remedy: "start it with --disaggregation-mode prefill or decode",
		find: func(g *model) (hits []hit) {
			if g.typ != "sglang" &&
				!slices.ContainsFunc(g.engines, func(e *Engine) bool { return e.Program == "sglang" && e.Role != 0 }) {
				return nil
			}
			for _, e := range g.engines {
				if e.Program == "sglang" && e.Role == 0 {
					hits = append(hits, hit{engines: []*Engine{e},
						text: "is started without --disaggregation-mode: it serves whole requests and ignores " +
							"handoffs"})
				}
			}
			return hits
		},
	},
	{
		code: "sglang-backend-differs", severity: Error,
		remedy: "write the same --disaggregation-transfer-backend for all engines",
		find: func(g *model) []hit {
			list := g.ofProgram("sglang")
			backend := func(e *Engine) string {
				if b := e.args["disaggregation-transfer-backend"]; b != "" {
					return b
				}
				return "mooncake"
			}
			if len(list) > 0 && differ(list, backend) {
				return []hit{{engines: list,
					text: "move KV in different ways (--disaggregation-transfer-backend, default mooncake)"}}
			}
			return nil
		},
	},
	differing("page-size-differs", "page-size", "keep KV in pages of different sizes (--page-size)"),
	{
		code: "sglang-port-gateway", severity: Warning,
		remedy: "write config.bootstrapPort, or the endpoint's attribute bootstrapPort, as the engine's " +
			"--disaggregation-bootstrap-port",
		find: func(g *model) (hits []hit) {
			if g.typ != "sglang" {
				return nil
			}
			asked := int(number(text(g.config, "bootstrapPort"), 8998))
			for _, e := range g.ofProgram("sglang") {
				if e.Role == prefill && int(number(e.args["disaggregation-bootstrap-port"], 8998)) != asked {
					hits = append(hits, hit{engines: []*Engine{e},
						text: fmt.Sprintf("opens its bootstrap server on another port than the gateway tells decode "+
							"(%d), unless the endpoint's attribute says so", asked)})
				}
			}
			return hits
		},
	},
	{
		code: "sglang-port-twice", severity: Error,
		remedy: "give each prefill engine of a machine its own --disaggregation-bootstrap-port",
		find: func(g *model) []hit {
			var ports []taken
			for _, e := range g.ofProgram("sglang") {
				if e.Role == prefill {
					p := int(number(e.args["disaggregation-bootstrap-port"], 8998))
					ports = append(ports, taken{e, p, p + 1})
				}
			}
			return clashes(ports, "open their bootstrap server on the same port of one machine")
		},
	},
	{
		code: "trtllm-transceiver", severity: Error,
		remedy: "write cache_transceiver_config: {backend: DEFAULT} in the file of --extra_llm_api_options",
		find: func(g *model) (hits []hit) {
			for _, e := range g.ofProgram("trtllm") {
				if _, given := e.args["transceiver-backend"]; !given && len(e.Unread) == 0 && len(g.engines) > 1 {
					hits = append(hits, hit{engines: []*Engine{e},
						text: "has no cache_transceiver_config: it cannot hand KV over"})
				}
			}
			return hits
		},
	},
	{
		code: "trtllm-transceiver-differs", severity: Error,
		remedy: "write the same cache_transceiver_config.backend for all engines",
		find: func(g *model) []hit {
			list := g.ofProgram("trtllm")
			if len(list) > 0 && differ(list, func(e *Engine) string { return e.args["transceiver-backend"] }) {
				return []hit{{engines: list, text: "move KV in different ways (cache_transceiver_config.backend)"}}
			}
			return nil
		},
	},
}

func (g *model) ofProgram(program string) []*Engine {
	return slices.DeleteFunc(slices.Clone(g.engines), func(e *Engine) bool { return e.Program != program })
}
