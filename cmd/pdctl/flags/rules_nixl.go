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

// lax reports whether an engine does not compare releases and layouts at NIXL's handshake.
func lax(s side) bool {
	_, given := s.t.Extra["enforce_handshake_compat"]
	return given && !yes(s.t.Extra, "enforce_handshake_compat")
}

var nixlRules = []rule{
	{code: "nixl-twice", severity: Error,
		find: func(g *model) (hits []hit) {
			seen := map[*Engine]int{}
			for _, s := range g.with(nixlClasses...) {
				if seen[s.Engine]++; seen[s.Engine] == 2 {
					hits = append(hits, hit{engines: []*Engine{s.Engine}})
				}
			}
			return hits
		},
		text:   "has two NIXL children: both answer with the same keys, which MultiConnector refuses with an error",
		remedy: "keep one NIXL child in the MultiConnector"},
	{code: "nixl-loopback", severity: Error, among: speaking(nixlClasses...), apart: true,
		bad: func(s side) bool {
			host := s.env["VLLM_NIXL_SIDE_CHANNEL_HOST"]
			return s.Role.Has(prefill) && (isLoopback(host) || host == "0.0.0.0" || host == "::")
		},
		text: "announces a side channel that is its own machine's loopback, or all its addresses: decode engines " +
			"elsewhere cannot read its KV",
		remedy: "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address of the engine's own machine that the others reach"},
	{code: "nixl-port-twice", severity: Error, among: speaking(nixlClasses...),
		clash: samePort(func(s side) (int, int) { return port(s.env["VLLM_NIXL_SIDE_CHANNEL_PORT"], 5600), s.DP }),
		text:  "take the same side channel port on one machine: the second does not start, or answers for the first",
		remedy: "give each engine of a machine its own VLLM_NIXL_SIDE_CHANNEL_PORT, as far apart as its data " +
			"parallel size"},
	{code: "nixl-tp", severity: Error,
		find: func(g *model) []hit {
			sides := g.with(nixlClasses...)
			for _, p := range sides {
				for _, d := range sides {
					if p.Role.Has(prefill) && d.Role.Has(decode) && p.TP%d.TP != 0 && d.TP%p.TP != 0 {
						return []hit{{engines: []*Engine{p.Engine, d.Engine}}}
					}
				}
			}
			return nil
		},
		text:   "have tensor parallel sizes of which none divides the other: KV heads cannot be split so",
		remedy: "make one tensor parallel size a multiple of the other"},
	{code: "nixl-pp", severity: Error, among: speaking("NixlConnector", "NixlPullConnector"),
		bad:    func(s side) bool { return s.PP > 1 },
		text:   "is pipeline parallel, which only push mode can hand over",
		remedy: "use NixlPushConnector with nixl-push, or no pipeline parallelism"},
	{code: "nixl-compat-off", severity: Warning, among: speaking(nixlClasses...), bad: lax,
		text: "does not compare releases and layouts at the handshake (enforce_handshake_compat false): KV of " +
			"another layout is read as it is",
		remedy: "leave enforce_handshake_compat out"},
}
