// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"slices"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/kvindex"
)

// KVIndex tells which engines hold how much of a prompt. A [kvindex.Index] does.
type KVIndex interface {
	Match(q *kvindex.Query, dst []kvindex.Hit) []kvindex.Hit
}

// PromptTokens tells the token ids of a request's prompt. It may be called concurrently. A pick waits for it, so its
// time has to be bounded, and it has to keep what it has found: each attempt of a request asks again.
type PromptTokens interface {
	// Tokens returns ids that are not changed afterwards. exact says that the engine will have the same: they were
	// given in the request, or by the engines' own tokenizer and template.
	Tokens(ctx context.Context, r *connector.ClientRequest) (ids []uint32, exact bool, err error)
}

// KVOptions are what [KV] asks. Index and Tokens are needed.
type KVOptions struct {
	Index  KVIndex
	Tokens PromptTokens
	// Model is the [kvindex.Source]'s; "" is the model that the request names.
	Model string
	// Adapter reports whether a request's model is a LoRA adapter: see [Adapters]. Nil: none is. It needs Model.
	Adapter func(model string) bool
}

// KV sends a prompt to the prefill engine that holds most of it, as the engines' events tell, and to the decode engine
// of its pairs that does: a later turn of a conversation finds the turns before it there. Of engines that hold the same
// the less loaded serves, and one whose load is over [WithBound] does not. Where that is not known (no engine holds any
// of the prompt, its tokens are not known, or not exactly) it chooses as [PrefixAffinity] does, which also knows the
// prompts that are on their way.
func KV(o KVOptions) Policy {
	return Policy{name: "kv", first: prefillLeg, needs: needs{loads: true, index: true},
		make: func(opts *options) chooser { return &kv{KVOptions: o, prefixes: newPrefixes(opts)} }}
}

type kv struct {
	KVOptions
	*prefixes // approximate, for what the index does not know
}

func (k *kv) choose(l *list, q *query) *target {
	if q.peer == nil {
		k.find(l, q)
	}
	var best *target
	most := 0
	for i := range q.prompt.hits {
		hit := &q.prompt.hits[i]
		if hit.Tokens < most {
			continue
		}
		engine := l.of(hit.Engine)
		if engine == nil {
			continue
		}
		for _, t := range engine.targets {
			switch {
			case !t.is(hit.Rank), q.rank(t) != good, q.over(l, t):
			case best == nil, hit.Tokens > most, lessLoaded(t, best):
				best, most = t, hit.Tokens
			}
		}
	}
	if best != nil {
		if q.peer == nil {
			q.prompt.readPrompt(k.seed, k.block, q.in.Request) // for chosen
		}
		return best
	}
	return k.prefixes.choose(l, q)
}

// find asks the index for a choice among several targets. It leaves no hits where it cannot.
func (k *kv) find(l *list, q *query) {
	q.prompt.hits = q.prompt.hits[:0]
	prompt := q.in.Prompt
	if q.in.Request == nil || !several(l, q.second, q.single) {
		return
	}
	if prompt != nil {
		k.look(q, prompt.IDs, prompt.Exact)
	} else if ids, exact, err := k.Tokens.Tokens(q.ctx, q.in.Request); err == nil {
		k.look(q, ids, exact)
	}
}

// several reports whether a list, or that of the partners of its only target, leaves a choice.
func several(l *list, second string, single bool) bool {
	if len(l.targets) != 1 || single {
		return len(l.targets) > 1
	}
	peers := l.targets[0].peers
	if second != "" {
		peers = peers.of(second)
	}
	return peers != nil && len(peers.targets) > 1
}

// look asks the index about the tokens of a prompt.
func (k *kv) look(q *query, ids []uint32, exact bool) {
	c, r := &q.prompt, q.in.Request
	if !exact {
		return
	}
	c.query = kvindex.Query{Model: r.Model, Tokens: ids}
	if k.Model != "" {
		c.query.Model = k.Model
		if k.Adapter != nil && k.Adapter(r.Model) {
			c.query.LoRA = r.Model
		}
	}
	if salt, ok := r.Field("cache_salt"); ok {
		c.query.Salt = gjson.ParseBytes(salt).String()
	}
	c.hits = k.Index.Match(&c.query, c.hits)
	c.query = kvindex.Query{}
}

// ask finds the tokens of a request's prompt.
func (k *kv) ask(ctx context.Context, r *connector.ClientRequest) (p pdflow.Prompt) {
	if ids, exact, err := k.Tokens.Tokens(ctx, r); err == nil {
		p = pdflow.Prompt{IDs: ids, Exact: exact}
	}
	return p
}

// match finds the engines that hold a beginning of the prompt, those with most of it first. It asks for no tokens.
func (k *kv) match(q *query, c *Candidates) {
	q.prompt.hits = q.prompt.hits[:0]
	if p := q.in.Prompt; p != nil && q.in.Request != nil {
		k.look(q, p.IDs, p.Exact)
	}
	for i := range q.prompt.hits {
		hit := &q.prompt.hits[i]
		c.matches = append(c.matches, match{engine: hit.Engine, rank: hit.Rank, tokens: hit.Tokens, exact: hit.Exact})
	}
	if len(c.matches) == 0 {
		k.prefixes.match(q, c)
		return
	}
	slices.SortFunc(c.matches, func(a, b match) int { return b.tokens - a.tokens })
}

// is reports whether a target may be that rank of its engine, among all ranks of the engine.
func (t *target) is(rank int) bool { return t.rank < 0 || int(t.start+t.rank) == rank }
