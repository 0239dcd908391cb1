// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"crypto/rand"
	"encoding/binary"

	"github.com/pdkit/pdkit/connector"
)

// Option is an option of [New].
type Option func(*options)

type options struct {
	seed       uint64
	rules      []connector.PairRule
	anyVersion bool
	byModel    bool
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

// WithSeed makes all choices follow from the seed, the snapshot and the order of calls, for tests and simulations.
// Without it the seed is random, so that a client can neither foresee a choice nor aim at one.
func WithSeed(seed uint64) Option { return func(o *options) { o.seed = seed } }

// WithRules adds rules for pairs to those that always hold (see [New]) and to the connector's own.
func WithRules(rules ...connector.PairRule) Option {
	return func(o *options) { o.rules = append(o.rules, rules...) }
}

// WithAnyVersion lets engines of different versions meet.
func WithAnyVersion() Option { return func(o *options) { o.anyVersion = true } }

// ByModel lets only engines take part whose Model is the one that the request names, or is not known. For a model that
// no engine is known to serve, those of unknown model are left, and a request that names none goes to any. Each model
// has lists of its own, in which the engines of unknown model stand too.
//
// It is for several base models behind one picker. Without it a picker leaves models to whoever made its set, since a
// request may well name what is no engine's Model: a LoRA adapter, or another name that the engines serve the model
// under.
func ByModel() Option { return func(o *options) { o.byModel = true } }

// WithBound says how far an engine may be loaded before a policy that prefers it looks elsewhere: factor times the mean
// of its role (at least 1; 1.25 without this option), plus slack tokens (4096), so that two requests on an idle fleet
// are no overload.
func WithBound(factor float64, slack int) Option {
	return func(o *options) { o.bound, o.slack = max(factor, 1), int64(max(slack, 0)) }
}

// WithPrefixMemory bounds what [PrefixAffinity] remembers: bytes of memory (4 MiB without this option, enough for 16 to
// 40 MB of distinct prompts), and the bytes of a prompt that are remembered as one (256; at least 32).
func WithPrefixMemory(bytes, block int) Option {
	return func(o *options) { o.memory, o.block = max(bytes, 1<<12), max(block, 32) }
}
