// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
)

// peerRules are the rules for protocols in which engines find each other by address.
var peerRules = []rule{
	{code: "nccl-tp-differs", severity: Error, among: speaking("P2pNcclConnector", "PyNcclConnector"),
		equal:  func(s side) string { return strconv.Itoa(s.TP) },
		text:   "have different tensor parallel sizes, which NCCL's connectors cannot bridge: requests hang",
		remedy: "give all engines the same --tensor-parallel-size"},
	{code: "p2pnccl-request-ids", severity: Error, among: speaking("P2pNcclConnector"),
		bad: func(s side) bool {
			return !s.Version.Before(0, 14) && s.env["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] != "1"
		},
		text: "adds a random ending to request ids, in which P2pNccl keeps addresses and by which both sides match " +
			"(vLLM 0.14 and later): KV never arrives",
		remedy: "set VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 on all engines"},
	{code: "p2pnccl-port-twice", severity: Error, among: speaking("P2pNcclConnector"),
		clash:  samePort(func(s side) (int, int) { return port(s.t.Port, 14579), s.TP }),
		text:   "take the same kv_port on one machine",
		remedy: "give each engine of a machine its own kv_port, as far apart as its tensor parallel size"},
	{code: "pynccl-ranks", severity: Error,
		find: func(g *model) []hit {
			sides := g.with("PyNcclConnector")
			if len(sides) < 2 || differ(sides, func(s side) string { return s.t.Rank }) {
				return nil
			}
			return asOne(sides)
		},
		text:   "have the same kv_rank: they wait for each other for ever",
		remedy: "write kv_rank 0 for prefill, 1 for decode, and kv_parallel_size 2 for both"},
	{code: "moriio-mode-differs", severity: Error,
		find: func(g *model) []hit {
			sides := g.with("MoRIIOConnector")
			reads := func(s side) bool { return yes(s.t.Extra, "read_mode") }
			switch {
			case len(sides) == 0:
				return nil
			case differ(sides, func(s side) string { return strconv.FormatBool(reads(s)) }):
				return []hit{{engines: enginesOf(sides), text: "disagree on who moves KV (read_mode)"}}
			case g.typ == "moriio" && reads(sides[0]) != (text(g.config, "mode") == "read"):
				return []hit{{engines: enginesOf(sides),
					text: "have another read_mode than the gateway's mode: requests hang, or run on KV that nobody " +
						"wrote"}}
			}
			return nil
		},
		remedy: "write the same read_mode for all engines, and mode: read or write in the gateway to match"},
	{code: "moriio-ports", severity: Error, among: speaking("MoRIIOConnector"),
		bad: func(s side) bool {
			return slices.ContainsFunc([]string{"http_port", "handshake_port", "notify_port"},
				func(k string) bool { return text(s.t.Extra, k) == "" })
		},
		text:   "lacks one of the ports that MoRIIO needs: it does not start",
		remedy: "write http_port, handshake_port and notify_port in kv_connector_extra_config"},
	{code: "offload-p2p-missing", severity: Error, when: behind("offload-p2p"), among: speaking("OffloadingConnector"),
		bad: func(s side) bool { return p2pTier(s.t) == nil },
		text: "offloads KV without a tier between engines: it ignores what the gateway tells it, and computes every " +
			"prompt itself",
		remedy: `add a secondary tier of type "p2p" to the OffloadingConnector's settings`},
	{code: "offload-old-keys", severity: Error, when: behind("offload-p2p"), among: tiered,
		bad: func(s side) bool { return s.Version.Before(0, 28) },
		text: "knows the P2P tier's keys by older names (before July 2026): it ignores what the gateway tells it, " +
			"and computes every prompt itself",
		remedy: "use vLLM 0.28 or newer"},
	{code: "offload-port-gateway", severity: Warning, when: behind("offload-p2p"),
		find: func(g *model) []hit {
			asked := port(text(g.config, "port"), 7777)
			sources := p2pSources(g)
			if len(sources) == 0 || slices.ContainsFunc(sources, func(s side) bool { return p2pPort(s) == asked }) {
				return nil
			}
			return []hit{{engines: enginesOf(sources),
				text: fmt.Sprintf("all listen on other ports than the gateway tells decode (%d; the engine's own "+
					"default is 5710), unless the endpoints' attributes say so", asked)}}
		},
		remedy: "write config.port, or the endpoint's attribute p2pPort, as the engine's VLLM_P2P_SIDE_CHANNEL_PORT"},
	{code: "offload-loopback", severity: Error, among: tiered, apart: true,
		bad: func(s side) bool {
			return s.Role.Has(prefill) && isLoopback(p2pSetting(s, "host", "VLLM_P2P_SIDE_CHANNEL_HOST"))
		},
		text:   "listens on its own machine's loopback only: engines elsewhere cannot fetch its KV",
		remedy: "set VLLM_P2P_SIDE_CHANNEL_HOST to an address of the engine's own machine that the others reach"},
	{code: "offload-port-twice", severity: Error, among: tiered,
		clash: samePort(func(s side) (int, int) { return p2pPort(s), s.DP }),
		text:  "take the same control port on one machine",
		remedy: "give each engine of a machine its own VLLM_P2P_SIDE_CHANNEL_PORT, as far apart as its data " +
			"parallel size"},
}

// p2pSources are the prefill engines with a tier between engines. Decode engines may be kv_both, too, and then listen
// elsewhere.
var p2pSources = only(tiered, func(s side) bool { return s.Role.Has(prefill) })

// p2pSetting is a tier's own setting, or the value of the variable that is its default.
func p2pSetting(s side, key, variable string) string {
	return cmp.Or(text(p2pTier(s.t), key), s.env[variable])
}

func p2pPort(s side) int { return port(p2pSetting(s, "port", "VLLM_P2P_SIDE_CHANNEL_PORT"), 5710) }

// sglangSources are SGLang's prefill engines, which have a bootstrap server.
var sglangSources = only(program("sglang"), func(s side) bool { return s.Role == prefill })

func sglangPort(s side) int { return port(s.args["disaggregation-bootstrap-port"], 8998) }

var otherEngineRules = []rule{
	{code: "sglang-mode", severity: Error, among: program("sglang"),
		when: func(g *model) bool {
			return g.typ == "sglang" ||
				slices.ContainsFunc(g.engines, func(e *Engine) bool { return e.Program == "sglang" && e.Role != 0 })
		},
		bad:    func(s side) bool { return s.Role == 0 },
		text:   "is started without --disaggregation-mode: it serves whole requests and ignores handoffs",
		remedy: "start it with --disaggregation-mode prefill or decode"},
	{code: "sglang-backend-differs", severity: Error, among: program("sglang"),
		equal:  func(s side) string { return cmp.Or(s.args["disaggregation-transfer-backend"], "mooncake") },
		text:   "move KV in different ways (--disaggregation-transfer-backend, default mooncake)",
		remedy: "write the same --disaggregation-transfer-backend for all engines"},
	differing("page-size-differs", "page-size", "keep KV in pages of different sizes (--page-size)"),
	{code: "sglang-port-gateway", severity: Warning, when: behind("sglang"),
		find: func(g *model) []hit {
			asked := port(text(g.config, "bootstrapPort"), 8998)
			return alone(sglangSources(g),
				fmt.Sprintf("opens its bootstrap server on another port than the gateway tells decode (%d), unless "+
					"the "+
					"endpoint's attribute says so", asked), func(s side) bool { return sglangPort(s) != asked })
		},
		remedy: "write config.bootstrapPort, or the endpoint's attribute bootstrapPort, as the engine's " +
			"--disaggregation-bootstrap-port"},
	{code: "sglang-port-twice", severity: Error, among: sglangSources,
		clash:  samePort(func(s side) (int, int) { return sglangPort(s), 1 }),
		text:   "open their bootstrap server on the same port of one machine",
		remedy: "give each prefill engine of a machine its own --disaggregation-bootstrap-port"},
	{code: "trtllm-transceiver", severity: Error, among: program("trtllm"),
		when: func(g *model) bool { return len(g.engines) > 1 },
		bad: func(s side) bool {
			_, given := s.args["transceiver-backend"]
			return !given && len(s.Unread) == 0
		},
		text:   "has no cache_transceiver_config: it cannot hand KV over",
		remedy: "write cache_transceiver_config: {backend: DEFAULT} in the file of --extra_llm_api_options"},
	{code: "trtllm-transceiver-differs", severity: Error, among: program("trtllm"),
		equal:  func(s side) string { return s.args["transceiver-backend"] },
		text:   "move KV in different ways (cache_transceiver_config.backend)",
		remedy: "write the same cache_transceiver_config.backend for all engines"},
}
