// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
)

var gatewayRules = []rule{
	{code: "gateway-connector", severity: Error,
		find: func(g *model) (hits []hit) {
			for _, e := range g.engines {
				if problem, remedy := g.mismatch(e); problem != "" {
					hits = append(hits, hit{engines: []*Engine{e}, text: problem, remedy: remedy})
				}
			}
			return hits
		}},
	{code: "gateway-relays-nothing", severity: Error, when: behind("http"),
		text: "waits for a handoff with each request, and the gateway's connector http relays none: every prompt is " +
			"computed twice",
		find: func(g *model) (hits []hit) {
			for _, s := range g.with(handoffs...) {
				hits = append(hits, hit{engines: []*Engine{s.Engine},
					remedy: "write kvConnector.type: " + speaks(s.Engine, s.t)})
			}
			return hits
		}},
	{code: "fallback-connector", severity: Warning,
		when: func(g *model) bool { return g.spec != nil },
		find: func(g *model) (hits []hit) {
			for next := g.spec.FallbackConnector; next != nil; next = next.FallbackConnector {
				inner := &model{engines: g.engines}
				inner.gateway(next)
				for _, e := range g.engines {
					if problem, _ := inner.mismatch(e); problem != "" {
						hits = append(hits, hit{engines: []*Engine{e},
							text: "does not speak what the gateway falls back to, " + inner.typ +
								": the fallback would compute prompts twice, or fail too"})
					}
				}
			}
			return hits
		},
		remedy: "add its class to the engines as a child of a MultiConnector, or remove the fallback"},
	{code: "lease-short", severity: Error,
		when: func(g *model) bool {
			return g.spec != nil && (g.typ == "nixl" || g.typ == "nixl-push" || g.typ == "multi")
		},
		find: func(g *model) (hits []hit) {
			promised := g.promisedLease()
			for _, s := range g.with(nixlClasses...) {
				if lease := nixlLease(s); s.Role.Has(prefill) && lease < promised {
					hits = append(hits, hit{engines: []*Engine{s.Engine}, text: fmt.Sprintf(
						"keeps unread KV for %s, and the gateway uses handoffs for %s: decode then reads blocks that "+
							"hold another request's KV, and answers 200", lease, promised)})
				}
			}
			return hits
		},
		remedy: "raise kv_lease_duration on the engines, or lower leaseDuration and timeouts.handoff in the gateway"},
	{code: "handoff-unlimited", severity: Warning,
		when: func(g *model) bool { return g.spec != nil && g.spec.Timeouts.Handoff == config.None },
		find: func(g *model) []hit { return asOne(g.with("NixlConnector", "NixlPullConnector")) },
		text: "release unread KV when its lease ends, and the gateway uses handoffs of any age (timeouts.handoff " +
			"is 0)",
		remedy: "leave timeouts.handoff out, or write less than the lease"},
	{code: "push-engine-id", severity: Error, among: speaking("NixlPushConnector"),
		when: func(g *model) bool { return text(g.config, "dispatch") != "serial" },
		bad:  func(s side) bool { return s.Role.Has(prefill) && s.t.EngineID == "" },
		text: "has no fixed engine_id: the gateway cannot name it to decode before it has answered, and a random one " +
			"changes at each start",
		remedy: `write a fixed "engine_id" on each prefill engine and the same as the endpoint's attribute engineID, ` +
			`or dispatch: serial in the gateway`},
}

// mismatch says why an engine does not work with the gateway's connector.
func (g *model) mismatch(e *Engine) (problem, remedy string) {
	switch g.typ {
	case "", "http":
		return "", ""
	case "sglang", "trtllm":
		if e.Program != g.typ {
			return fmt.Sprintf("is %s, and the gateway's connector is %s", e.Program, g.typ),
				"write the connector of the engine that runs"
		}
		return "", ""
	}
	classes, known := classesOf[g.typ]
	if !known {
		return "", ""
	}
	if e.Program != "vllm" {
		return fmt.Sprintf("is %s, and the gateway's connector %s is for vLLM", e.Program, g.typ),
			"write kvConnector.type: " + e.Program
	}
	if e.Transfer == nil {
		return "", "" // the rule no-kv-transfer reports it
	}
	if g.typ == "multi" {
		if e.Transfer.Class != "MultiConnector" {
			return fmt.Sprintf("speaks %s, and the gateway expects a MultiConnector", e.Transfer.Class),
				"write kvConnector.type: " + speaks(e, e.Transfer)
		}
		children, _ := g.config["connectors"].([]any)
		for _, c := range children {
			child, _ := c.(map[string]any)
			if name := childName(child); !speaksOneOf(e, classesOf[name]) && classesOf[name] != nil {
				return fmt.Sprintf("has no child of its MultiConnector for the gateway's child %s", name),
					"write the same children for the gateway and the engines"
			}
		}
		return "", ""
	}
	if speaksOneOf(e, classes) {
		return "", ""
	}
	return fmt.Sprintf("speaks %s, and the gateway's connector %s speaks %s", strings.Join(e.Classes(), " and "), g.typ,
			strings.Join(classes, " or ")),
		"write kvConnector.type: " + speaks(e, e.Transfer)
}

func speaksOneOf(e *Engine, classes []string) bool {
	return slices.ContainsFunc(e.Transfer.Leaves(), func(t *Transfer) bool { return slices.Contains(classes, t.Class) })
}

// childName is the connector of a gateway's child, which may be written in the engine's form.
func childName(child map[string]any) string {
	if class := text(child, "kv_connector"); class != "" {
		return gatewayName(class, object(child, "kv_connector_extra_config"))
	}
	return gatewayName(text(child, "type"), object(child, "config"))
}

// speaks is the gateway's name for the protocol of an engine's connector.
func speaks(e *Engine, t *Transfer) string {
	if t.Class == "LMCacheConnectorV1" && isPD(e) {
		return "lmcache-pd"
	}
	for _, name := range []string{"nixl", "nixl-push", "lmcache", "mooncake", "mooncake-store", "mooncake-ascend",
		"mooncake-hybrid", "ascend-store", "flexkv", "hf3fs", "ucm", "tpu",
		"ascend-layerwise", "sharedstorage", "pynccl", "p2pnccl", "moriio", "offload-p2p", "multi"} {
		if slices.Contains(classesOf[name], t.Class) {
			return name
		}
	}
	return "http"
}

// promisedLease is the greatest age of a handoff that the gateway may still use.
func (g *model) promisedLease() time.Duration {
	var lease config.Duration
	promised := seconds(30)
	settings := g.config
	if g.typ == "multi" {
		settings = g.nixlChild()
	}
	if raw := text(settings, "leaseDuration"); raw != "" && lease.UnmarshalJSON(connector.Quote(raw)) == nil {
		promised = time.Duration(lease)
	}
	if h := g.spec.Timeouts.Handoff; h > 0 {
		promised = h
	}
	return promised
}

// nixlChild returns the settings of the NIXL child among the gateway's children. For a child in the engine's form they
// are the engine's own settings.
func (g *model) nixlChild() map[string]any {
	children, _ := g.config["connectors"].([]any)
	for _, c := range children {
		child, _ := c.(map[string]any)
		if name := childName(child); name != "nixl" && name != "nixl-push" {
			continue
		}
		config := object(child, "config")
		if lease := text(object(child, "kv_connector_extra_config"), "kv_lease_duration"); lease != "" {
			config["leaseDuration"] = lease + "s"
		}
		return config
	}
	return nil
}

// nixlLease is how long an engine keeps unread KV. Before 0.22 (vllm#41383) a variable set it.
func nixlLease(s side) time.Duration {
	if s.Version.Before(0, 22) {
		return seconds(number(s.env["VLLM_NIXL_ABORT_REQUEST_TIMEOUT"], 480))
	}
	return seconds(number(text(s.t.Extra, "kv_lease_duration"), 30))
}

func seconds(n float64) time.Duration { return time.Duration(n * float64(time.Second)) }

var versionRules = []rule{
	{code: "version-differs", severity: Warning,
		find: func(g *model) []hit {
			known := slices.DeleteFunc(slices.Clone(g.engines),
				func(e *Engine) bool { return e.Version == launch.Version{} })
			if !differ(known, func(e *Engine) string { return e.Version.String() }) {
				return nil
			}
			h := hit{engines: known}
			if slices.ContainsFunc(g.with(nixlClasses...), func(s side) bool { return !lax(s) }) {
				h.severity, h.text = Error,
					"are of different releases: NIXL's handshake compares them and refuses, each request fails"
			}
			return []hit{h}
		},
		text:   "are of different releases: their KV and its keys may differ",
		remedy: "run the same release on all engines"},
	{code: "connector-renamed", severity: Error,
		find: func(g *model) (hits []hit) {
			for _, s := range g.with(folderClasses...) {
				name, since := "ExampleConnector", "from vLLM 0.13 on"
				if s.Version.Before(0, 13) {
					name, since = "SharedStorageConnector", "before vLLM 0.13"
				}
				if s.t.Class != name {
					hits = append(hits, hit{engines: []*Engine{s.Engine}, remedy: "write " + name,
						text: "names " + s.t.Class + ", which is " + name + " " + since + ": it does not start"})
				}
			}
			return hits
		}},
	{code: "connector-too-new", severity: Error,
		find: func(g *model) []hit {
			return slices.Concat(
				alone(g.with("NixlPushConnector"), // vllm#35264, June 2026
					"names NixlPushConnector, which vLLM has from 0.23 on: it does not start",
					func(s side) bool { return s.Version.Before(0, 23) }),
				alone(tiered(g), "has a tier of type p2p, which vLLM has from 0.24 on: it does not start",
					func(s side) bool { return s.Version.Before(0, 24) }))
		},
		remedy: "use a newer engine, or another connector"},
	{code: "connector-removed", severity: Error,
		find: func(g *model) []hit {
			return slices.Concat(
				alone(g.with("P2pNcclConnector"), "names P2pNcclConnector, which is gone from vLLM 0.23 on: it does "+
					"not start",
					func(s side) bool { return !s.Version.Before(0, 23) }),
				alone(g.with("PyNcclConnector"), // with the engine core that it was for
					"names PyNcclConnector, which is gone from vLLM 0.11 on: it does not start",
					func(s side) bool { return !s.Version.Before(0, 11) }))
		},
		remedy: "use NixlConnector, or an older engine, whose release must be told"},
}

// mlaName matches models whose attention is MLA: all ranks hold the same KV, and LMCache's keys do not have the number
// of ranks (LMCache 0.5.6, v1/token_database.py: _make_key_by_hash).
var mlaName = regexp.MustCompile(`(?i)deepseek-(v[2-9]|r1|coder-v2|prover-v2)|kimi-(k|linear)|longcat|minicpm3|glm-5`)

func isMLA(e *Engine) bool { return mlaName.MatchString(e.Model) }

var mambaName = regexp.MustCompile(`(?i)mamba|jamba|bamba|zamba|nemotron-h|falcon-h1|granite-4|qwen3-next|plamo-2|lfm2`)

// isMamba recognizes models with Mamba layers by their name, or by arguments that only they need.
func isMamba(e *Engine) bool {
	for _, arg := range []string{"mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size", "mamba-cache-mode"} {
		if e.args[arg] != "" {
			return true
		}
	}
	return mambaName.MatchString(e.Model)
}
