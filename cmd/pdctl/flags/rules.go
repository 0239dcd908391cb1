// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"slices"
)

// rules are in the order in which findings are reported: the rules about all connectors, then those of each connector.
var rules = slices.Concat(generalRules, gatewayRules, versionRules, nixlRules, lmcacheRules, storeRules, mooncakeRules,
	peerRules, otherEngineRules, pairRules, encodeRules)

// classesOf are the engines' classes with which each of the gateway's connectors works.
var classesOf = map[string][]string{
	"nixl":      {"NixlConnector", "NixlPullConnector"},
	"nixl-push": {"NixlPushConnector"},
	"lmcache": {"LMCacheConnectorV1", "LMCacheMPConnector", "LMCacheConnector", "LMCacheAscendConnector",
		"LMCacheConnectorV1Dynamic"},
	"lmcache-pd":       {"LMCacheConnectorV1", "LMCacheAscendConnector", "LMCacheConnectorV1Dynamic"},
	"mooncake":         {"MooncakeConnector"},
	"mooncake-store":   {"MooncakeStoreConnector"},
	"ascend-store":     {"AscendStoreConnector", "MooncakeConnectorStoreV1"},
	"flexkv":           {"FlexKVConnectorV1"},
	"hf3fs":            {"HF3FSKVConnector"},
	"ucm":              {"UCMConnector"},
	"mooncake-ascend":  {"MooncakeConnectorV1"},
	"mooncake-hybrid":  {"MooncakeHybridConnector"},
	"ascend-layerwise": {"MooncakeLayerwiseConnector"},
	"sharedstorage":    {"ExampleConnector", "SharedStorageConnector"},
	"pynccl":           {"PyNcclConnector"},
	"p2pnccl":          {"P2pNcclConnector"},
	"moriio":           {"MoRIIOConnector"},
	"offload-p2p":      {"OffloadingConnector"},
	"multi":            {"MultiConnector"},
	"kvbm":             {"NixlConnector", "NixlPullConnector"},
	"tpu":              {"TPUConnector"},
}

// handoffs are the classes that move KV only if the gateway says so in each request.
var handoffs = []string{
	"NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MooncakeConnectorV1",
	"MooncakeHybridConnector", "MooncakeLayerwiseConnector", "P2pNcclConnector", "MoRIIOConnector",
	"TPUConnector",
}

var generalRules = []rule{
	{code: "settings-unread", severity: Warning,
		bad:    func(s side) bool { return len(s.Unread) > 0 },
		text:   "names a configuration file that could not be read, so its settings are not checked",
		remedy: "give the file beside the command line"},
	{code: "no-kv-transfer", severity: Error,
		when: func(g *model) bool { // without a gateway that needs it, all engines may be without KV transfer
			return g.typ != "" && g.typ != "http" ||
				slices.ContainsFunc(g.engines, func(e *Engine) bool { return e.Transfer != nil })
		},
		bad:    func(s side) bool { return s.Program == "vllm" && s.Transfer == nil },
		text:   "is started without --kv-transfer-config: it computes every prompt itself",
		remedy: "start it with the --kv-transfer-config that `pdctl render` prints"},
	{code: "role-unknown", severity: Error,
		bad:    func(s side) bool { return s.Transfer != nil && s.Role == 0 },
		text:   "has no kv_role that vLLM knows: it does not start",
		remedy: "write kv_producer for prefill, kv_consumer for decode, or kv_both"},
	{code: "roles", severity: Error,
		when: func(g *model) bool {
			return len(g.engines) > 1 && slices.ContainsFunc(g.engines, func(e *Engine) bool { return e.Role != 0 })
		},
		find: func(g *model) []hit {
			switch {
			case len(g.consumers()) == 0:
				return []hit{{engines: g.engines, text: "all produce KV and none consumes it"}}
			case len(g.producers()) == 0:
				return []hit{{engines: g.engines, text: "all consume KV and none produces it"}}
			}
			return nil
		},
		remedy: "write kv_producer for prefill engines and kv_consumer for decode engines (SGLang: " +
			"--disaggregation-mode)"},
	{code: "connector-differs", severity: Error,
		among:  only((*model).all, func(s side) bool { return s.Transfer != nil }),
		equal:  func(s side) string { return jsonText(s.Classes()) },
		text:   "speak different KV connectors: no KV moves between them",
		remedy: "give all engines of a model the same kv_connector"},
	{code: "engine-differs", severity: Error,
		equal:  func(s side) string { return s.Program },
		text:   "are different engines: none understands the other's KV",
		remedy: "run the same engine on both sides"},
	{code: "model-differs", severity: Error, when: (*model).pair,
		equal:  func(s side) string { return s.Model },
		text:   "load different models: KV of one is noise to the other",
		remedy: "load the same model everywhere; --served-model-name gives it the name that requests use"},
	differing("block-size-differs", "block-size",
		"cut KV into blocks of different sizes (--block-size): blocks of one do not fit the other"),
	differing("kv-cache-dtype-differs", "kv-cache-dtype",
		"keep KV in different types (--kv-cache-dtype): the bytes of one mean something else to the other"),
	differing("dtype-differs", "dtype",
		"compute in different types (--dtype): NIXL refuses the handshake, stores give KV of another precision"),
	{code: "load-failure-hidden", severity: Warning,
		bad: func(s side) bool {
			return s.Transfer != nil && slices.ContainsFunc(append(s.Transfer.Leaves(), s.Transfer),
				func(t *Transfer) bool { return t.FailurePolicy == "recompute" })
		},
		text: `computes the prompt again in silence when KV cannot be loaded (kv_load_failure_policy "recompute"): ` +
			`failed transfers look like slow responses`,
		remedy: `write "kv_load_failure_policy":"fail"; the gateway then tries another pair`},
	{code: "engine-id-twice", severity: Error,
		clash: func(a, b side) bool {
			return a.Transfer != nil && b.Transfer != nil && a.Transfer.EngineID != "" &&
				a.Transfer.EngineID == b.Transfer.EngineID
		},
		text:   "have the same engine_id: their peers take one for the other",
		remedy: "give each engine its own engine_id, or leave it out (push needs it on prefill engines)"},
	{code: "mamba-tp", severity: Error,
		when: func(g *model) bool {
			return g.pair() && slices.ContainsFunc(g.engines, isMamba) &&
				differ(g.engines, func(e *Engine) string { return jsonText(e.TP) })
		},
		text: "serve a model with Mamba layers with different tensor parallel sizes: its state cannot be cut anew",
		find: func(g *model) []hit {
			h := hit{engines: g.engines}
			if len(g.with(nixlClasses...)) == len(g.engines) &&
				!slices.ContainsFunc(g.engines, func(e *Engine) bool { return e.Version.Before(0, 28) }) {
				// vllm#37635 and what followed; nixl/base_worker.py of 0.32.0. Falcon-H1's was cut wrongly (vllm#55208,
				// open when this was written).
				h.severity, h.text = Warning,
					"serve a model with Mamba layers with different tensor parallel sizes: NIXL cuts its state anew, "+
						"for some models wrongly (vllm#55208)"
			}
			return []hit{h}
		},
		remedy: "give prefill and decode the same --tensor-parallel-size, and both VLLM_SSM_CONV_STATE_LAYOUT=DS"},
	{code: "mamba-layout", severity: Error, when: (*model).pair,
		find: func(g *model) []hit {
			without := slices.DeleteFunc(slices.Clone(g.engines), func(e *Engine) bool {
				return !isMamba(e) || e.Transfer == nil || e.env["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"
			})
			if len(without) == 0 {
				return nil
			}
			return []hit{{engines: without}} // of all of them, since the others' layout does not help
		},
		text: "serve a model with Mamba layers without VLLM_SSM_CONV_STATE_LAYOUT=DS: its state cannot be handed " +
			"over",
		remedy: "set VLLM_SSM_CONV_STATE_LAYOUT=DS for all of them"},
}

// differing compares one argument of all engines.
func differing(code, arg, text string) rule {
	return rule{code: code, severity: Error, when: (*model).pair,
		equal: func(s side) string { return s.args[arg] },
		text:  text, remedy: "write the same --" + arg + " for all engines"}
}
