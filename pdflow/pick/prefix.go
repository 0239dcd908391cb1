// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"slices"
	"sync"
)

// prefixes is an approximate prefix tree over prompts. A node stands for a block of a prompt together with all blocks
// before it. Its key is the hash of all these blocks, so nodes need no links and live in a table of fixed size. A new
// node replaces the node of its set that was used the longest time ago. A node holds the last engines that got a prompt
// with this beginning.
type prefixes struct {
	seed   uint64
	block  int
	shards [shardCount]shard
}

const (
	shardCount = 64 // many, so that two picks seldom wait for the same lock
	setNodes   = 8
	ownersMost = 3
	nodeBytes  = 24
)

type shard struct {
	mu    sync.Mutex
	clock uint32
	nodes []node // in sets of setNodes
}

type node struct {
	key    uint64
	used   uint32             // the shard's clock at its last use; 0: never used
	owners [ownersMost]uint32 // slots, the latest first; 0: none
}

func newPrefixes(o *options) *prefixes {
	p := &prefixes{seed: o.seed, block: o.block}
	sets := max(o.memory/(shardCount*setNodes*nodeBytes), 1)
	for i := range p.shards {
		p.shards[i].nodes = make([]node, sets*setNodes)
	}
	return p
}

// set returns the shard of a key, and the nodes that may hold the key. The caller locks the shard before it uses them.
func (p *prefixes) set(key uint64) (*shard, []node) {
	s := &p.shards[key%shardCount]
	i := key / shardCount % uint64(len(s.nodes)/setNodes) * setNodes
	return s, s.nodes[i : i+setNodes]
}

// owners returns the engines that got a prompt with this beginning.
func (p *prefixes) owners(key uint64) (owners [ownersMost]uint32, known bool) {
	s, set := p.set(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range set {
		if set[i].key == key && set[i].used != 0 {
			return set[i].owners, true
		}
	}
	return owners, false
}

// own records that an engine gets a prompt with this beginning.
func (p *prefixes) own(key uint64, slot uint32) {
	s, set := p.set(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clock++; s.clock == 0 { // once in 4 billion uses; the order is right again soon after
		s.clock = 1
	}
	oldest := 0
	for i := range set {
		n := &set[i]
		if n.key == key && n.used != 0 {
			n.used = s.clock
			n.promote(slot)
			return
		}
		if n.used < set[oldest].used {
			oldest = i
		}
	}
	set[oldest] = node{key: key, used: s.clock, owners: [ownersMost]uint32{slot}}
}

// promote puts an owner first. If the list is full, the last owner drops out.
func (n *node) promote(slot uint32) {
	last := slot
	for i, o := range n.owners {
		n.owners[i] = last
		if o == slot {
			return
		}
		last = o
	}
}

func (p *prefixes) choose(l *list, q *query) *target {
	if q.peer != nil {
		return q.lighter(l)
	}
	c := &q.prompt
	c.readPrompt(p.seed, p.block, q.in.Request)
	c.owners = c.owners[:0]
	for _, key := range c.chain {
		owners, known := p.owners(key)
		if !known {
			break
		}
		c.owners = append(c.owners, owners)
	}
	var tried [2 * ownersMost]uint32
	n := 0
	for i := len(c.owners) - 1; i >= 0 && n < len(tried); i-- {
		for _, owner := range c.owners[i] {
			if owner == 0 || n == len(tried) || slices.Contains(tried[:n], owner) {
				continue
			}
			tried[n] = owner
			n++
			if at, ok := l.index[owner]; ok {
				if t := l.targets[at]; q.rank(t) == good && !q.over(l, t) {
					return t
				}
			}
		}
	}
	return q.lighter(l)
}

// chosen records the whole prompt at the time of the pick, since the next request with it may come before this one has
// a response.
func (p *prefixes) chosen(q *query, first, second *target) {
	for _, key := range q.prompt.chain {
		p.own(key, first.slot.id)
		if second != nil && q.opts.candidates {
			p.own(key, second.slot.id)
		}
	}
}

// match finds the engines that lately got a beginning of the prompt, the longest first.
func (p *prefixes) match(q *query, c *Candidates) {
	x := &q.prompt
	x.readPrompt(p.seed, p.block, q.in.Request)
	x.owners = x.owners[:0]
	for _, key := range x.chain {
		owners, known := p.owners(key)
		if !known {
			break
		}
		x.owners = append(x.owners, owners)
	}
	for i := len(x.owners) - 1; i >= 0 && len(c.matches) < 2*CandidatesMost; i-- {
		for _, owner := range x.owners[i] {
			known := func(m match) bool { return m.slot == owner }
			if owner != 0 && !slices.ContainsFunc(c.matches, known) {
				c.matches = append(c.matches, match{slot: owner, tokens: (i + 1) * p.block / bytesPerToken})
			}
		}
	}
}
