// SPDX-License-Identifier: Apache-2.0

package attr

import (
	"slices"
	"strconv"
	"strings"
)

// PairRule decides by an attribute which prefill and decode engines can exchange KV. Compatible gets the attribute's
// two values. Pickers call it only if both engines have the attribute: an attribute that is left out forbids nothing.
// Compatible is called by several goroutines at once, must not block, and must always return the same for the same
// values.
type PairRule struct {
	Attribute  string
	Compatible func(prefill, decode string) bool
}

// Same allows a pair whose values of the attribute are the same: tpSize for a protocol that cannot reshape KV.
func Same(attribute string) PairRule {
	return PairRule{Attribute: attribute, Compatible: same}
}

// Multiple allows a pair if one number divides the other: tpSize for protocols that split or join whole heads.
func Multiple(attribute string) PairRule {
	return PairRule{Attribute: attribute, Compatible: func(p, d string) bool {
		return divides(p, d) || divides(d, p)
	}}
}

// PrefillMultiple allows a pair if prefill's number is a multiple of decode's: tpSize for protocols that join heads and
// never split them.
func PrefillMultiple(attribute string) PairRule {
	return PairRule{Attribute: attribute, Compatible: func(p, d string) bool { return divides(d, p) }}
}

// DecodeMultiple allows a pair if decode's number is a multiple of prefill's.
func DecodeMultiple(attribute string) PairRule {
	return PairRule{Attribute: attribute, Compatible: divides}
}

// Shared allows a pair whose comma-separated lists have an element in common: the KV networks that each engine is on.
func Shared(attribute string) PairRule {
	return PairRule{Attribute: attribute, Compatible: shared}
}

// divides reports whether b is a multiple of a. Equal values always fit, even if they are not numbers: a mistake that
// all entries share must not forbid every pair.
func divides(a, b string) bool {
	if same(a, b) {
		return true
	}
	x, errX := strconv.ParseUint(strings.TrimSpace(a), 10, 32)
	y, errY := strconv.ParseUint(strings.TrimSpace(b), 10, 32)
	return errX == nil && errY == nil && x > 0 && y > 0 && y%x == 0
}

// same reports whether two values are the same but for white space around them.
func same(a, b string) bool { return strings.TrimSpace(a) == strings.TrimSpace(b) }

// shared reports whether two comma separated lists have an element in common.
func shared(a, b string) bool {
	of := strings.Split(b, ",")
	for x := range strings.SplitSeq(a, ",") {
		if x = strings.TrimSpace(x); x != "" && slices.ContainsFunc(of, func(y string) bool { return same(x, y) }) {
			return true
		}
	}
	return false
}
