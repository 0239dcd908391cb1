// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"fmt"
	"net/http"
	"strings"
)

// Policy is one of this package's ways to choose a pair. It is a value without state, so that pickers can share it.
type Policy struct {
	name  string
	first leg // whose engine is chosen first; the other is one that it can meet
	needs needs
	make  func(*options) chooser
}

// String returns the policy's name, as [ParsePolicy] reads it, without what follows the name.
func (p Policy) String() string {
	if p.make == nil {
		return RoundRobin().name
	}
	return p.name
}

// RoundRobin goes through the decode engines one after another, and for each decode engine through the prefill engines
// that it can be paired with. It does not look at loads.
func RoundRobin() Policy {
	return Policy{name: "round-robin", first: decodeLeg, make: func(*options) chooser { return roundRobin{} }}
}

// Random takes both engines by chance. It knows no loads.
func Random() Policy {
	return Policy{name: "random", first: decodeLeg, make: func(*options) chooser { return random{} }}
}

// Weighted takes both engines by chance, in proportion to their attribute weight: a whole number up to a million, 100
// without it. An engine of weight 0 serves only when no other can. The weight of an engine with ranks is that of each
// rank.
func Weighted() Policy {
	return Policy{name: "weighted", first: decodeLeg, needs: needs{weights: true},
		make: func(*options) chooser { return weighted{} }}
}

// LeastLoad takes the decode engine with the fewest tokens in flight, and the prefill engine with the fewest that it
// can meet. A request counts on prefill until that leg has ended, with a quarter of its body's bytes; on decode until
// its stream has ended, with its token limit on top (256 without one, at most 32,768).
func LeastLoad() Policy {
	return Policy{name: "least-load", first: decodeLeg, needs: needs{loads: true, tree: true},
		make: func(*options) chooser { return leastLoad{} }}
}

// TwoChoices takes the less loaded of two random engines, on each leg. Loads count as for [LeastLoad].
func TwoChoices() Policy {
	return Policy{name: "two-choices", first: decodeLeg, needs: needs{loads: true},
		make: func(*options) chooser { return twoChoices{} }}
}

// SessionAffinity sends requests with the same value of a header ("" is X-Session-Id) to the same pair, by consistent
// hashing with bounded load: where an engine is loaded beyond [WithBound], the next one on the circle serves. Requests
// without the header go by [TwoChoices].
func SessionAffinity(header string) Policy {
	if header == "" {
		header = "X-Session-Id"
	}
	header = http.CanonicalHeaderKey(header)
	return Policy{name: "session", first: decodeLeg, needs: needs{loads: true, ring: true},
		make: func(o *options) chooser { return &session{header, o.seed} }}
}

// PrefixAffinity sends a prompt to the prefill engine that has lately got the prompt with the longest beginning in
// common, unless it is loaded beyond [WithBound]; then to one with a shorter beginning in common, else to the less
// loaded of two. Decode engines go by [TwoChoices]. What engines got is remembered per model, in blocks of the prompt's
// bytes, within [WithPrefixMemory]; it is an approximation, since what they hold they do not tell.
func PrefixAffinity() Policy {
	return Policy{name: "prefix", first: prefillLeg, needs: needs{loads: true, index: true},
		make: func(o *options) chooser { return newPrefixes(o) }}
}

// ZoneFirst takes decode engines of the zone ("" is any), and with each a prefill engine of its own zone, the less
// loaded of two. Where a zone has none, or is loaded beyond [WithBound], other zones help.
func ZoneFirst(zone string) Policy {
	return Policy{name: "zone", first: decodeLeg, needs: needs{loads: true, zones: true},
		make: func(*options) chooser { return zoneFirst{zone} }}
}

// Sticky takes decode engines by [TwoChoices], and with each one of the last four prefill engines that it met, the
// least loaded, unless all are loaded beyond [WithBound]: engines that meet for the first time exchange addresses first
// (NIXL's handshake), which the request waits for.
func Sticky() Policy {
	return Policy{name: "sticky", first: decodeLeg, needs: needs{loads: true, indexPeers: true},
		make: func(*options) chooser { return sticky{} }}
}

// Policies returns the names that [ParsePolicy] reads.
func Policies() []string {
	return []string{"round-robin", "random", "weighted", "least-load", "two-choices", "session", "prefix", "zone",
		"sticky"}
}

// ParsePolicy reads a policy's name. session=HEADER and zone=ZONE say what [SessionAffinity] and [ZoneFirst] take.
func ParsePolicy(s string) (Policy, error) {
	name, value, given := strings.Cut(s, "=")
	if given && (value == "" || name != "session" && name != "zone") {
		return Policy{}, fmt.Errorf("policy: only session=HEADER and zone=ZONE take a value")
	}
	switch name {
	case "round-robin":
		return RoundRobin(), nil
	case "random":
		return Random(), nil
	case "weighted":
		return Weighted(), nil
	case "least-load":
		return LeastLoad(), nil
	case "two-choices":
		return TwoChoices(), nil
	case "session":
		return SessionAffinity(value), nil
	case "prefix":
		return PrefixAffinity(), nil
	case "zone":
		return ZoneFirst(value), nil
	case "sticky":
		return Sticky(), nil
	}
	return Policy{}, fmt.Errorf("policy: want one of %s", strings.Join(Policies(), ", "))
}
