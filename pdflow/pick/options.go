// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"crypto/rand"
	"encoding/binary"
	"slices"
	"strconv"
	"strings"
)

// Option is an option of [New].
type Option func(*options)

type options struct {
	seed       uint64
	rules      []Rule
	anyVersion bool
	bound      float64
	slack      int64
	memory     int
	block      int
}

func newOptions(opts []Option) *options {
	o := &options{bound: 1.25, slack: 4096, memory: 4 << 20, block: 256}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program instead
	o.seed = binary.LittleEndian.Uint64(b[:])
	for _, opt := range opts {
		opt(o)
	}
	return o
}

// WithSeed makes all choices follow from the seed, the snapshot and the order of calls, for tests and simulations. Without it the seed
// is random, so that a client can neither foresee a choice nor aim at one.
func WithSeed(seed uint64) Option { return func(o *options) { o.seed = seed } }

// WithRules adds rules for pairs to those that always hold (one group, one model, one engine version).
func WithRules(rules ...Rule) Option {
	return func(o *options) { o.rules = append(o.rules, rules...) }
}

// WithAnyVersion lets engines of different versions meet.
func WithAnyVersion() Option { return func(o *options) { o.anyVersion = true } }

// WithBound says how far an engine may be loaded before a policy that prefers it looks elsewhere: factor times the mean of its role
// (at least 1; 1.25 without this option), plus slack tokens (4096), so that two requests on an idle fleet are no overload.
func WithBound(factor float64, slack int) Option {
	return func(o *options) { o.bound, o.slack = max(factor, 1), int64(max(slack, 0)) }
}

// WithPrefixMemory bounds what [PrefixAffinity] remembers: bytes of memory (4 MiB without this option, enough for 16 to 40 MB of
// distinct prompts), and the bytes of a prompt that are remembered as one (256; at least 32).
func WithPrefixMemory(bytes, block int) Option {
	return func(o *options) { o.memory, o.block = max(bytes, 1<<12), max(block, 32) }
}

// Rule says by an attribute which prefill and decode engines can exchange KV. Compatible gets the attribute's values; it is asked once
// for each two values in a snapshot, and only if both engines have the attribute: what a list does not tell, forbids nothing.
type Rule struct {
	Attribute  string
	Compatible func(prefill, decode string) bool
}

// SameValue lets engines meet whose attribute is the same, for example tpSize for a connector that cannot reshape KV.
func SameValue(attribute string) Rule {
	return Rule{attribute, func(p, d string) bool { return p == d }}
}

// Multiple lets engines meet one of whose numbers divides the other: tpSize for connectors that split or join heads in whole parts.
func Multiple(attribute string) Rule {
	return Rule{attribute, func(p, d string) bool {
		a, errA := strconv.ParseUint(p, 10, 32)
		b, errB := strconv.ParseUint(d, 10, 32)
		return errA == nil && errB == nil && a > 0 && b > 0 && (a%b == 0 || b%a == 0)
	}}
}

// SharedValue lets engines meet whose comma separated lists have an element in common, for example the KV networks that they are on.
func SharedValue(attribute string) Rule {
	return Rule{attribute, func(p, d string) bool {
		of := strings.Split(d, ",")
		for x := range strings.SplitSeq(p, ",") {
			if x = strings.TrimSpace(x); x != "" && slices.ContainsFunc(of, func(y string) bool { return strings.TrimSpace(y) == x }) {
				return true
			}
		}
		return false
	}}
}
