// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
)

// sizes are the attributes in connectors' pair rules that flags can give. Block size and KV type have findings of their
// own, which compare all engines.
var sizes = []struct {
	attribute, what string
	of              func(*Engine) int
}{
	{attr.TPSize, "tensor parallel sizes", func(e *Engine) int { return e.TP }},
	{attr.PPSize, "pipeline parallel sizes", func(e *Engine) int { return e.PP }},
}

// toldApart are classes with a finding of their own about tensor-parallel sizes. A test checks that it agrees with the
// connectors' rules.
var toldApart = append([]string{"P2pNcclConnector", "PyNcclConnector"}, nixlClasses...)

var pairRules = []rule{{
	code: "pair-sizes", severity: Error,
	remedy: `choose sizes that the connector's page allows ("Which engines can be paired")`,
	find: func(g *model) (hits []hit) {
		for _, s := range g.speakers() {
			for _, r := range g.pairRules(s.typ) {
				hits = append(hits, s.parted(r)...)
			}
		}
		return hits
	},
}}

// speakers are the engines that use one protocol: one of vLLM's classes, or another engine's own protocol.
type speakers struct {
	typ     string
	engines []*Engine
}

func (g *model) speakers() (list []speakers) {
	for _, e := range g.engines {
		types := e.Classes()
		if e.Program != "vllm" {
			types = []string{e.Program}
		}
		for _, typ := range types {
			at := slices.IndexFunc(list, func(s speakers) bool { return s.typ == typ })
			if at < 0 {
				at = len(list)
				list = append(list, speakers{typ: typ})
			}
			list[at].engines = append(list[at].engines, e)
		}
	}
	return list
}

// pairRules are the rules of the gateway's connector if it works with typ, otherwise those that typ's connector has
// without settings. There are none if that connector is not registered or requires settings.
func (g *model) pairRules(typ string) []attr.PairRule {
	spec := config.Spec{Type: typ}
	if g.spec != nil && (g.typ == typ || slices.Contains(classesOf[g.typ], typ)) {
		spec = *g.spec
	}
	c, err := connector.Open(spec)
	if err != nil {
		return nil
	}
	return c.Traits().PairRules
}

// parted returns the first two engines that a rule does not allow as a pair.
func (s speakers) parted(r attr.PairRule) []hit {
	for _, size := range sizes {
		if size.attribute != r.Attribute || size.attribute == attr.TPSize && slices.Contains(toldApart, s.typ) {
			continue
		}
		for _, p := range s.engines {
			for _, d := range s.engines {
				a, b := size.of(p), size.of(d)
				if p != d && p.Role.Has(prefill) && d.Role.Has(decode) &&
					!r.Compatible(strconv.Itoa(a), strconv.Itoa(b)) {
					return []hit{{engines: []*Engine{p, d},
						text: fmt.Sprintf("have %s (%d and %d) between which %s cannot hand KV over", size.what, a, b,
							s.typ)}}
				}
			}
		}
	}
	return nil
}
