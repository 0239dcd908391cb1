// SPDX-License-Identifier: Apache-2.0

package multi

import (
	"cmp"
	"slices"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/check"
)

// merge makes one declaration from the children's. If one child does not support something, or leaves something behind,
// so does the whole. The lease is the shortest one.
func merge(children []Child, order connector.Order) connector.Traits {
	t := connector.Traits{Name: Name, Order: order, APIs: connector.APIs(), Carries: children[0].traits.Carries,
		Handoff:   connector.Handoff{MultiUse: true, ContentStore: true},
		Serving:   connector.Serving{ReusedInUsage: true},
		Ending:    connector.Ending{RefusalReleases: true},
		PairRules: pairRules(children)}
	for i := range children {
		c := &children[i].traits
		t.APIs = slices.DeleteFunc(t.APIs, func(a connector.API) bool { return !(&check.Rules{Traits: *c}).Carries(a) })
		t.Carries = slices.DeleteFunc(slices.Clone(t.Carries),
			func(m string) bool { return !slices.Contains(c.Carries, m) })
		t.Members = union(t.Members, c.Members)
		t.Handoff.Lease = shorter(t.Handoff.Lease, c.Handoff.Lease)
		t.Handoff.TransferTimeout = shorter(t.Handoff.TransferTimeout, c.Handoff.TransferTimeout)
		if h := &c.Handoff; h.Named() { // of only one child
			t.Handoff.Member, t.Handoff.Header, t.Handoff.FromDecode = h.Member, h.Header, h.FromDecode
		}
		if c.Ending.FailureStop != "" {
			t.Ending.FailureStop = c.Ending.FailureStop
		}
		t.Handoff.MultiUse = t.Handoff.MultiUse && c.Handoff.MultiUse
		t.Ending.EndsByLength = t.Ending.EndsByLength || c.Ending.EndsByLength
		t.RawPrefill = t.RawPrefill || c.RawPrefill
		t.OwnRequestID = t.OwnRequestID || c.OwnRequestID
		t.Handoff.ContentStore = t.Handoff.ContentStore && c.Handoff.ContentStore
		t.Serving.PairOnly = t.Serving.PairOnly || c.Serving.PairOnly
		t.Serving.PrefillPairOnly = t.Serving.PrefillPairOnly || c.Serving.PrefillPairOnly
		t.Ending.Orphans = t.Ending.Orphans || c.Ending.Orphans
		t.Serving.ReusedInUsage = t.Serving.ReusedInUsage && c.Serving.ReusedInUsage
		t.Serving.CountKey = cmp.Or(t.Serving.CountKey, c.Serving.CountKey)
		t.Ending.RefusalReleases = t.Ending.RefusalReleases && (c.Ending.RefusalReleases || c.Handoff.ContentStore)
		t.Ending.RefusalHolds = t.Ending.RefusalHolds || c.Ending.RefusalHolds
		t.Ending.PrefillFinishes = t.Ending.PrefillFinishes || c.Ending.PrefillFinishes
		t.Attributes = append(t.Attributes, c.Attributes...)
	}
	return t
}

func union(a, b []string) []string {
	for _, s := range b {
		if !slices.Contains(a, s) {
			a = append(a, s)
		}
	}
	return a
}

// pairRules are the rules of the children that transfer from engine to engine: the request carries all their
// parameters, and if one transfer fails, no other child serves instead. Each engine may have its own stores beside
// them, since D loads from the transfer what its store does not have (multi_connector.py of vLLM 0.32.0:
// get_num_new_matched_tokens asks one child after the other). If all children are stores, one that both engines share
// is enough. Then an attribute decides only if every child has a rule for it.
func pairRules(children []Child) []attr.PairRule {
	var transfers, stores [][]attr.PairRule
	for i := range children {
		if t := &children[i].traits; t.Handoff.ContentStore {
			stores = append(stores, t.PairRules)
		} else {
			transfers = append(transfers, t.PairRules)
		}
	}
	if len(transfers) > 0 {
		return slices.Concat(transfers...)
	}
	return anyOf(stores)
}

// anyOf are rules, one for each attribute, that allow a pair if the rule of one child allows it.
func anyOf(children [][]attr.PairRule) (rules []attr.PairRule) {
	for _, first := range children[0] {
		compatible := []func(p, d string) bool{first.Compatible}
		for _, other := range children[1:] {
			at := slices.IndexFunc(other, func(r attr.PairRule) bool { return r.Attribute == first.Attribute })
			if at < 0 {
				break
			}
			compatible = append(compatible, other[at].Compatible)
		}
		if len(compatible) == len(children) {
			rules = append(rules, attr.PairRule{Attribute: first.Attribute, Compatible: func(p, d string) bool {
				return slices.ContainsFunc(compatible, func(f func(p, d string) bool) bool { return f(p, d) })
			}})
		}
	}
	return rules
}

// shorter returns the shorter of two times, of which 0 is none.
func shorter(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}
