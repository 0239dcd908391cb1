// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"slices"
	"strconv"
	"strings"
)

// PairRule says by an attribute which prefill and decode engines can exchange KV. Compatible gets the attribute's values; pickers ask it
// only if both engines have the attribute: what a list does not tell, forbids nothing. It is called by several goroutines at once,
// must not block, and must answer the same each time.
type PairRule struct {
	Attribute  string
	Compatible func(prefill, decode string) bool
}

// SameValue lets engines meet whose attribute is the same, for example tpSize for a protocol that cannot reshape KV.
func SameValue(attribute string) PairRule {
	return PairRule{attribute, func(p, d string) bool { return p == d }}
}

// Multiple lets engines meet one of whose numbers divides the other: tpSize for protocols that split or join heads in whole parts.
func Multiple(attribute string) PairRule {
	return PairRule{attribute, func(p, d string) bool {
		a, errA := strconv.ParseUint(p, 10, 32)
		b, errB := strconv.ParseUint(d, 10, 32)
		return errA == nil && errB == nil && a > 0 && b > 0 && (a%b == 0 || b%a == 0)
	}}
}

// SharedValue lets engines meet whose comma separated lists have an element in common, for example the KV networks that they are on.
func SharedValue(attribute string) PairRule {
	return PairRule{attribute, func(p, d string) bool {
		of := strings.Split(d, ",")
		for x := range strings.SplitSeq(p, ",") {
			if x = strings.TrimSpace(x); x != "" && slices.ContainsFunc(of, func(y string) bool { return strings.TrimSpace(y) == x }) {
				return true
			}
		}
		return false
	}}
}
