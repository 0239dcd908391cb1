// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"github.com/pdkit/pdkit/discovery"
)

const (
	prefill = discovery.RolePrefill
	decode  = discovery.RoleDecode
)

var nixlClasses = []string{"NixlConnector", "NixlPullConnector", "NixlPushConnector"}

var nixlRules = []rule{
	{
		code: "nixl-twice", severity: Error, remedy: "keep one NIXL child in the MultiConnector",
		find: func(g *model) (hits []hit) {
			seen := map[*Engine]int{}
			for _, s := range g.with(nixlClasses...) {
				if seen[s.Engine]++; seen[s.Engine] == 2 {
					hits = append(hits, hit{engines: []*Engine{s.Engine},
						text: "has two NIXL children: both answer with the same keys, which MultiConnector refuses " +
							"with an error"})
				}
			}
			return hits
		},
	},
	{
		code: "nixl-loopback", severity: Error,
		remedy: "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address of the engine's own machine that the others reach",
		find: func(g *model) []hit {
			sides := g.with(nixlClasses...)
			if !apart(enginesOf(sides)) {
				return nil
			}
			return alone(sides, "announces a side channel that is its own machine's loopback, or all its addresses: "+
				"decode engines elsewhere cannot read its KV", func(s side) bool {
				host := s.env["VLLM_NIXL_SIDE_CHANNEL_HOST"]
				return s.Role.Has(prefill) && (isLoopback(host) || host == "0.0.0.0" || host == "::")
			})
		},
	},
	{
		code: "nixl-port-twice", severity: Error,
		remedy: "give each engine of a machine its own VLLM_NIXL_SIDE_CHANNEL_PORT, as far apart as its data " +
			"parallel size",
		find: func(g *model) []hit {
			var ports []taken
			for _, s := range g.with(nixlClasses...) {
				from := int(number(s.env["VLLM_NIXL_SIDE_CHANNEL_PORT"], 5600))
				ports = append(ports, taken{s.Engine, from, from + s.DP})
			}
			return clashes(ports,
				"take the same side channel port on one machine: the second does not start, or answers for the first")
		},
	},
	{
		code: "nixl-tp", severity: Error, remedy: "make one tensor parallel size a multiple of the other",
		find: func(g *model) []hit {
			sides := g.with(nixlClasses...)
			for _, p := range sides {
				for _, d := range sides {
					if p.Role.Has(prefill) && d.Role.Has(decode) && p.TP%d.TP != 0 && d.TP%p.TP != 0 {
						return []hit{{engines: []*Engine{p.Engine, d.Engine},
							text: "have tensor parallel sizes of which none divides the other: KV heads cannot be " +
								"split so"}}
					}
				}
			}
			return nil
		},
	},
	{
		code: "nixl-pp", severity: Error, remedy: "use NixlPushConnector with nixl-push, or no pipeline parallelism",
		find: func(g *model) []hit {
			return alone(g.with("NixlConnector", "NixlPullConnector"),
				"is pipeline parallel, which only push mode can hand over", func(s side) bool { return s.PP > 1 })
		},
	},
	{
		code: "nixl-compat-off", severity: Warning, remedy: "leave enforce_handshake_compat out",
		find: func(g *model) []hit {
			return alone(g.with(nixlClasses...),
				"does not compare releases and layouts at the handshake (enforce_handshake_compat false): KV of "+
					"another layout is read as it is", func(s side) bool {
					_, given := s.t.Extra["enforce_handshake_compat"]
					return given && !yes(s.t.Extra, "enforce_handshake_compat")
				})
		},
	},
}
