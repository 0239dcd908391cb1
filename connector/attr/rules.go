// SPDX-License-Identifier: Apache-2.0

package attr

import (
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/compare"
)

// Same lets engines meet whose attribute is the same, for example tpSize for a protocol that cannot reshape KV.
func Same(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: compare.Same}
}

// Multiple lets engines meet one of whose numbers divides the other: tpSize for protocols that split or join heads in
// whole parts.
func Multiple(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: func(p, d string) bool { return divides(p, d) || divides(d, p) }}
}

// PrefillMultiple lets engines meet if prefill's number is a multiple of decode's: tpSize for protocols that join heads
// and never split them.
func PrefillMultiple(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: func(p, d string) bool { return divides(d, p) }}
}

// DecodeMultiple lets engines meet if decode's number is a multiple of prefill's.
func DecodeMultiple(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: divides}
}

// Shared lets engines meet whose comma separated lists have an element in common, for example the KV networks that they
// are on.
func Shared(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: compare.Shared}
}

// divides reports whether b is a multiple of a. An engine meets its like whatever its value is, even one that is no
// number: a slip that all entries share parts nobody.
func divides(a, b string) bool {
	if compare.Same(a, b) {
		return true
	}
	x, errX := strconv.ParseUint(strings.TrimSpace(a), 10, 32)
	y, errY := strconv.ParseUint(strings.TrimSpace(b), 10, 32)
	return errX == nil && errY == nil && x > 0 && y > 0 && y%x == 0
}
