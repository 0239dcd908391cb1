// SPDX-License-Identifier: Apache-2.0

package attr

import (
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/compare"
)

// Same allows a pair whose values of the attribute are the same: tpSize for a protocol that cannot reshape KV.
func Same(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: compare.Same}
}

// Multiple allows a pair if one number divides the other: tpSize for protocols that split or join whole heads.
func Multiple(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: func(p, d string) bool {
		return divides(p, d) || divides(d, p)
	}}
}

// PrefillMultiple allows a pair if prefill's number is a multiple of decode's: tpSize for protocols that join heads and
// never split them.
func PrefillMultiple(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: func(p, d string) bool { return divides(d, p) }}
}

// DecodeMultiple allows a pair if decode's number is a multiple of prefill's.
func DecodeMultiple(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: divides}
}

// Shared allows a pair whose comma-separated lists have an element in common: the KV networks that each engine is on.
func Shared(attribute string) connector.PairRule {
	return connector.PairRule{Attribute: attribute, Compatible: compare.Shared}
}

// divides reports whether b is a multiple of a. Equal values always fit, even if they are not numbers: a mistake that
// all entries share must not forbid every pair.
func divides(a, b string) bool {
	if compare.Same(a, b) {
		return true
	}
	x, errX := strconv.ParseUint(strings.TrimSpace(a), 10, 32)
	y, errY := strconv.ParseUint(strings.TrimSpace(b), 10, 32)
	return errX == nil && errY == nil && x > 0 && y > 0 && y%x == 0
}
