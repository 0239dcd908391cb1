// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"slices"
	"strconv"
	"strings"
)

// The attributes of an engine's entry that connectors' rules about pairs ask for. Numbers are in digits, names as the engine's flags have
// them. A list need not tell them: what it does not tell, forbids nothing.
const (
	AttrTPSize       = "tpSize"       // tensor-parallel size
	AttrPPSize       = "ppSize"       // pipeline-parallel size
	AttrBlockSize    = "blockSize"    // tokens in a block of KV: vLLM's --block-size, SGLang's --page-size, TensorRT-LLM's tokens_per_block
	AttrKVCacheDtype = "kvCacheDtype" // the type that KV is kept in: --kv-cache-dtype, written alike for all engines
	AttrStore        = "store"        // the stores that the engine keeps KV in, by names of the list's own, separated by commas
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
	return PairRule{attribute, same}
}

// Multiple lets engines meet one of whose numbers divides the other: tpSize for protocols that split or join heads in whole parts.
func Multiple(attribute string) PairRule {
	return PairRule{attribute, func(p, d string) bool { return divides(p, d) || divides(d, p) }}
}

// PrefillMultiple lets engines meet if prefill's number is a multiple of decode's: tpSize for protocols that join heads and never split them.
func PrefillMultiple(attribute string) PairRule {
	return PairRule{attribute, func(p, d string) bool { return divides(d, p) }}
}

// DecodeMultiple lets engines meet if decode's number is a multiple of prefill's.
func DecodeMultiple(attribute string) PairRule {
	return PairRule{attribute, divides}
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

func same(p, d string) bool { return strings.TrimSpace(p) == strings.TrimSpace(d) }

// divides reports whether b is a multiple of a. An engine meets its like whatever its value is, even one that is no number: a slip that all
// entries share parts nobody.
func divides(a, b string) bool {
	if same(a, b) {
		return true
	}
	x, errX := strconv.ParseUint(strings.TrimSpace(a), 10, 32)
	y, errY := strconv.ParseUint(strings.TrimSpace(b), 10, 32)
	return errX == nil && errY == nil && x > 0 && y > 0 && y%x == 0
}
