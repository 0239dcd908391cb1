// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"slices"

	"github.com/pdkit/pdkit/connector"
)

// PairRules are those of the children that transfer from engine to engine: the request carries all their parameters, and there is no
// second chance when one of them fails. Stores beside them may be each engine's own: D takes what its store has not from the transfer
// (multi_connector.py of vLLM 0.32.0: get_num_new_matched_tokens asks one child after the other). If all children are stores, one that
// both engines share is enough, so that only an attribute of which every child has a rule says anything.
func (c *Connector) PairRules() []connector.PairRule {
	var transfers, stores [][]connector.PairRule
	for i := range c.children {
		child := c.children[i].KVConnector
		var rules []connector.PairRule
		if p, ok := connector.As[connector.Pairer](child); ok {
			rules = p.PairRules()
		}
		if isStore(child) {
			stores = append(stores, rules)
		} else {
			transfers = append(transfers, rules)
		}
	}
	if len(transfers) > 0 {
		return slices.Concat(transfers...)
	}
	return anyOf(stores)
}

// anyOf are rules by which engines meet if one of the children lets them, as far as one attribute tells.
func anyOf(children [][]connector.PairRule) (rules []connector.PairRule) {
	for _, first := range children[0] {
		compatible := []func(p, d string) bool{first.Compatible}
		for _, other := range children[1:] {
			at := slices.IndexFunc(other, func(r connector.PairRule) bool { return r.Attribute == first.Attribute })
			if at < 0 {
				break
			}
			compatible = append(compatible, other[at].Compatible)
		}
		if len(compatible) == len(children) {
			rules = append(rules, connector.PairRule{Attribute: first.Attribute, Compatible: func(p, d string) bool {
				return slices.ContainsFunc(compatible, func(f func(p, d string) bool) bool { return f(p, d) })
			}})
		}
	}
	return rules
}
