// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"crypto/rand"
	"encoding/binary"
	"time"

	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery/inspect"
)

// Option is an option of [New].
type Option func(*options)

type options struct {
	seed       uint64
	rules      []attr.PairRule
	anyVersion bool
	byModel    bool
	bound      float64
	slack      int64
	memory     int
	block      int
	load       func(id string) inspect.Load
	now        func() time.Time
	candidates bool
}

func newOptions(opts []Option) *options {
	o := &options{bound: 1.25, slack: 4096, memory: 4 << 20, block: 256, now: time.Now}
	var b [8]byte
	_, _ = rand.Read(b[:]) // crypto/rand ends the program rather than fail
	o.seed = binary.LittleEndian.Uint64(b[:])
	for _, opt := range opts {
		opt(o)
	}
	return o
}

// WithSeed makes all choices depend only on the seed, the snapshot and the order of calls. It is for tests and
// simulations. Without it the seed is random, so that a client can neither foresee a choice nor aim at an engine.
func WithSeed(seed uint64) Option { return func(o *options) { o.seed = seed } }

// WithRules adds rules for pairs to the rules of [New] and to the connector's own.
func WithRules(rules ...attr.PairRule) Option {
	return func(o *options) { o.rules = append(o.rules, rules...) }
}

// WithAnyVersion lets engines of different versions form a pair.
func WithAnyVersion() Option { return func(o *options) { o.anyVersion = true } }

// ByModel lets only engines serve a request whose Model is the one that the request names, or is unknown. If no engine
// is known to serve the model, only engines of unknown model are left. A request that names no model may go to any
// engine. Each model has lists of its own; engines of unknown model are in all of them.
//
// Use it for several base models behind one picker. Without it the picker does not look at the request's model, since a
// request may name a model that is no engine's Model: a LoRA adapter, or another name under which the engines serve it.
func ByModel() Option { return func(o *options) { o.byModel = true } }

// WithBound says how much load an engine may have before a policy that prefers it chooses another: factor times the
// mean of its role, plus slack tokens. factor is at least 1, and 1.25 without this option; slack is 4096 without it, so
// that two requests on an idle fleet are no overload.
func WithBound(factor float64, slack int) Option {
	return func(o *options) { o.bound, o.slack = max(factor, 1), int64(max(slack, 0)) }
}

// WithPrefixMemory bounds what [PrefixAffinity] remembers: bytes of memory (4 MiB without this option, enough for 16 to
// 40 MB of distinct prompts), and the size of the blocks in which prompts are remembered (block: 256 bytes without this
// option, at least 32).
func WithPrefixMemory(bytes, block int) Option {
	return func(o *options) { o.memory, o.block = max(bytes, 1<<12), max(block, 32) }
}
