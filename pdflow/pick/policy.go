// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"fmt"
	"net/http"
	"strings"
)

// Policy is a way to choose a pair. It is a value without state, so pickers can share it.
type Policy struct {
	name string
	// the leg whose engine is chosen first; the other engine is chosen from those that can form a pair with it
	first leg
	needs needs
	make  func(*options) chooser
}

// String returns the policy's name as [ParsePolicy] reads it, without a =VALUE. For [Score] and [KV], which that cannot
// read, it returns score and kv.
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

// Random chooses both engines at random. It does not look at loads.
func Random() Policy {
	return Policy{name: "random", first: decodeLeg, make: func(*options) chooser { return random{} }}
}

// Weighted chooses both engines at random, in proportion to their attribute weight: a whole number up to a million, 100
// if an engine has none. An engine of weight 0 serves only when no other can. If an engine has ranks, each rank has its
// weight.
func Weighted() Policy {
	return Policy{name: "weighted", first: decodeLeg, needs: needs{weights: true},
		make: func(*options) chooser { return weighted{} }}
}

// LeastLoad chooses the decode engine with the fewest tokens in flight, and of the prefill engines that it can be
// paired with the one with the fewest. A request counts on its prefill engine until the prefill leg has ended, with a
// quarter of its body's bytes. It counts on its decode engine until the stream has ended, with the same and its token
// limit (256 if it has none, at most 32,768).
func LeastLoad() Policy {
	return Policy{name: "least-load", first: decodeLeg, needs: needs{loads: true, tree: true},
		make: func(*options) chooser { return leastLoad{} }}
}

// TwoChoices chooses the less loaded of two random engines, for each leg. Loads count as for [LeastLoad].
func TwoChoices() Policy {
	return Policy{name: "two-choices", first: decodeLeg, needs: needs{loads: true},
		make: func(*options) chooser { return twoChoices{} }}
}

// SessionAffinity sends requests with the same value of a header ("" is X-Session-Id) to the same pair. It uses
// consistent hashing with bounded load: if an engine's load is over [WithBound], the next one on the circle serves. A
// request without the header is served as by [TwoChoices].
func SessionAffinity(header string) Policy {
	if header == "" {
		header = "X-Session-Id"
	}
	header = http.CanonicalHeaderKey(header)
	return Policy{name: "session", first: decodeLeg, needs: needs{loads: true, ring: true},
		make: func(o *options) chooser { return &session{header, o.seed} }}
}

// PrefixAffinity sends a prompt to the prefill engine that lately got the prompt with the longest common beginning, if
// its load is within [WithBound]. Else it tries engines with a shorter common beginning, and at last takes the less
// loaded of two random ones. Decode engines are chosen as by [TwoChoices]. The policy remembers per model which engine
// got which blocks of prompts, within [WithPrefixMemory]. That is an approximation, since engines do not tell what they
// hold.
func PrefixAffinity() Policy {
	return Policy{name: "prefix", first: prefillLeg, needs: needs{loads: true, index: true},
		make: func(o *options) chooser { return newPrefixes(o) }}
}

// ZoneFirst chooses decode engines of the zone ("" is any), and with each a prefill engine of the decode engine's zone,
// the less loaded of two. If a zone has none, or its engine's load is over [WithBound], an engine of another zone
// serves.
func ZoneFirst(zone string) Policy {
	return Policy{name: "zone", first: decodeLeg, needs: needs{loads: true, zones: true},
		make: func(*options) chooser { return zoneFirst{zone} }}
}

// Sticky chooses decode engines as [TwoChoices] does, and with each the least loaded of the last four prefill engines
// that it was paired with, unless all of these are over [WithBound]. Two engines that are paired for the first time
// exchange addresses first (NIXL's handshake), and the request waits for that.
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
	if name == "kv" {
		return Policy{}, fmt.Errorf("policy: kv needs an index of what engines hold: see pick.KV")
	}
	return Policy{}, fmt.Errorf("policy: want one of %s", strings.Join(Policies(), ", "))
}
