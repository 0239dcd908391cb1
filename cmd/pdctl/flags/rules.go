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
	{
		code: "settings-unread", severity: Warning, remedy: "give the file beside the command line",
		find: func(g *model) (hits []hit) {
			for _, e := range g.engines {
				if len(e.Unread) > 0 {
					hits = append(hits, hit{engines: []*Engine{e},
						text: "names a configuration file that could not be read, so its settings are not checked"})
				}
			}
			return hits
		},
	},
	{
		code: "no-kv-transfer", severity: Error,
		remedy: "start it with the --kv-transfer-config that `pdctl render` prints",
		find: func(g *model) (hits []hit) {
			other := slices.ContainsFunc(g.engines, func(e *Engine) bool { return e.Transfer != nil })
			if !other && (g.typ == "" || g.typ == "http") {
				return nil // no engine has KV transfer, and no gateway needs it
			}
			for _, e := range g.engines {
				if e.Program == "vllm" && e.Transfer == nil {
					hits = append(hits, hit{engines: []*Engine{e},
						text: "is started without --kv-transfer-config: it computes every prompt itself"})
				}
			}
			return hits
		},
	},
	{
		code: "role-unknown", severity: Error,
		remedy: "write kv_producer for prefill, kv_consumer for decode, or kv_both",
		find: func(g *model) (hits []hit) {
			for _, e := range g.engines {
				if e.Transfer != nil && e.Role == 0 {
					hits = append(hits, hit{engines: []*Engine{e},
						text: "has no kv_role that vLLM knows: it does not start"})
				}
			}
			return hits
		},
	},
	{
		code: "roles", severity: Error,
		remedy: "write kv_producer for prefill engines and kv_consumer for decode engines (SGLang: " +
			"--disaggregation-mode)",
		find: func(g *model) []hit {
			if len(g.engines) < 2 || !slices.ContainsFunc(g.engines, func(e *Engine) bool { return e.Role != 0 }) {
				return nil
			}
			switch {
			case len(g.consumers()) == 0:
				return []hit{{engines: g.engines, text: "all produce KV and none consumes it"}}
			case len(g.producers()) == 0:
				return []hit{{engines: g.engines, text: "all consume KV and none produces it"}}
			}
			return nil
		},
	},
	{
		code: "connector-differs", severity: Error, remedy: "give all engines of a model the same kv_connector",
		find: func(g *model) []hit {
			var with []*Engine
			for _, e := range g.engines {
				if e.Transfer != nil {
					with = append(with, e)
				}
			}
			if len(with) > 0 && differ(with, func(e *Engine) string { return jsonText(e.Classes()) }) {
				return []hit{{engines: with, text: "speak different KV connectors: no KV moves between them"}}
			}
			return nil
		},
	},
	{
		code: "engine-differs", severity: Error, remedy: "run the same engine on both sides",
		find: func(g *model) []hit {
			if differ(g.engines, func(e *Engine) string { return e.Program }) {
				return []hit{{engines: g.engines, text: "are different engines: none understands the other's KV"}}
			}
			return nil
		},
	},
	{
		code: "model-differs", severity: Error,
		remedy: "load the same model everywhere; --served-model-name gives it the name that requests use",
		find: func(g *model) []hit {
			if g.pair() && differ(g.engines, func(e *Engine) string { return e.Model }) {
				return []hit{{engines: g.engines, text: "load different models: KV of one is noise to the other"}}
			}
			return nil
		},
	},
	differing("block-size-differs", "block-size",
		"cut KV into blocks of different sizes (--block-size): blocks of one do not fit the other"),
	differing("kv-cache-dtype-differs", "kv-cache-dtype",
		"keep KV in different types (--kv-cache-dtype): the bytes of one mean something else to the other"),
	differing("dtype-differs", "dtype",
		"compute in different types (--dtype): NIXL refuses the handshake, stores give KV of another precision"),
	{
		code: "load-failure-hidden", severity: Warning,
		remedy: `write "kv_load_failure_policy":"fail"; the gateway then tries another pair`,
		find: func(g *model) (hits []hit) {
			for _, e := range g.engines {
				policies := []*Transfer{e.Transfer}
				if e.Transfer != nil {
					policies = append(policies, e.Transfer.Leaves()...)
				}
				if slices.ContainsFunc(policies,
					func(t *Transfer) bool { return t != nil && t.FailurePolicy == "recompute" }) {
					hits = append(hits, hit{engines: []*Engine{e},
						text: `computes the prompt again in silence when KV cannot be loaded (kv_load_failure_policy ` +
							`"recompute"): failed transfers look like slow responses`})
				}
			}
			return hits
		},
	},
	{
		code: "engine-id-twice", severity: Error,
		remedy: "give each engine its own engine_id, or leave it out (push needs it on prefill engines)",
		find: func(g *model) (hits []hit) {
			for i, a := range g.engines {
				for _, b := range g.engines[i+1:] {
					if a.Transfer != nil && b.Transfer != nil && a.Transfer.EngineID != "" &&
						a.Transfer.EngineID == b.Transfer.EngineID {
						hits = append(hits, hit{engines: []*Engine{a, b},
							text: "have the same engine_id: their peers take one for the other"})
					}
				}
			}
			return hits
		},
	},
	{
		code: "mamba-tp", severity: Error,
		remedy: "give prefill and decode the same --tensor-parallel-size, and both VLLM_SSM_CONV_STATE_LAYOUT=DS",
		find: func(g *model) []hit {
			if !g.pair() || !slices.ContainsFunc(g.engines, isMamba) ||
				!differ(g.engines, func(e *Engine) string { return jsonText(e.TP) }) {
				return nil
			}
			h := hit{engines: g.engines,
				text: "serve a model with Mamba layers with different tensor parallel sizes: its state cannot be " +
					"cut anew"}
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
	},
	{
		code: "mamba-layout", severity: Error, remedy: "set VLLM_SSM_CONV_STATE_LAYOUT=DS for all of them",
		find: func(g *model) []hit {
			var without []*Engine
			for _, e := range g.engines {
				if isMamba(e) && e.Transfer != nil && e.env["VLLM_SSM_CONV_STATE_LAYOUT"] != "DS" {
					without = append(without, e)
				}
			}
			if len(without) == 0 || !g.pair() {
				return nil
			}
			return []hit{{engines: without,
				text: "serve a model with Mamba layers without VLLM_SSM_CONV_STATE_LAYOUT=DS: its state cannot be " +
					"handed over"}}
		},
	},
}

// differing compares one argument of all engines that use a connector.
func differing(code, arg, text string) rule {
	return rule{
		code: code, severity: Error, remedy: "write the same --" + arg + " for all engines",
		find: func(g *model) []hit {
			if g.pair() && differ(g.engines, func(e *Engine) string { return e.args[arg] }) {
				return []hit{{engines: g.engines, text: text}}
			}
			return nil
		},
	}
}
