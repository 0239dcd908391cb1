// SPDX-License-Identifier: Apache-2.0

package core

import "slices"

// blockPool is the paged KV memory of one engine: real bytes, reference counts, a free list in order of eviction and
// the prefix cache over it. Blocks have the ids 1 to n; 0 is the null block, as in vLLM, and ends the free list here.
// It has no lock: its owner's lock guards it.
type blockPool struct {
	size   int // bytes of a block
	memory []byte
	meta   []blockMeta
	cached map[TokenKey]int32
	free   int

	removed func(TokenKey) // is told of a key that leaves the prefix cache; nil: nobody is
}

type blockMeta struct {
	refs       int32
	prev, next int32 // neighbours in the free list, while refs is 0
	key        TokenKey
	keyed      bool // in cached under key
}

func newBlockPool(blocks, size int) *blockPool {
	p := &blockPool{size: size, memory: make([]byte, (blocks+1)*size), meta: make([]blockMeta, blocks+1),
		cached: map[TokenKey]int32{}}
	for id := range blocks + 1 {
		p.meta[id].prev, p.meta[id].next = int32(id-1), int32(id+1)
	}
	p.meta[0].prev, p.meta[blocks].next = int32(blocks), 0
	p.free = blocks
	return p
}

func (p *blockPool) blocks() int { return len(p.meta) - 1 }

func (p *blockPool) used() int { return p.blocks() - p.free }

// bytes is the memory of a block.
func (p *blockPool) bytes(id int32) []byte {
	at := int(id) * p.size
	return p.memory[at : at+p.size : at+p.size]
}

// match gives the cached blocks of the longest known prefix.
func (p *blockPool) match(keys []TokenKey) []int32 {
	var ids []int32
	for _, key := range keys {
		id, ok := p.cached[key]
		if !ok {
			break
		}
		ids = append(ids, id)
	}
	return ids
}

// fits reports whether n more blocks are free beside the ones to take from the cache.
func (p *blockPool) fits(n int, hits []int32) bool {
	need := n
	for _, id := range hits {
		if p.meta[id].refs == 0 {
			need++
		}
	}
	return need <= p.free
}

// hold takes one more reference on a block.
func (p *blockPool) hold(id int32) {
	m := &p.meta[id]
	if m.refs == 0 {
		p.meta[m.prev].next, p.meta[m.next].prev = m.next, m.prev
		p.free--
	}
	m.refs++
}

// take allocates the block that has been free for longest, and drops it from the prefix cache. Its bytes stay until the
// new owner overwrites them.
func (p *blockPool) take() (int32, bool) {
	id := p.meta[0].next
	if id == 0 {
		return 0, false
	}
	p.hold(id)
	p.forget(id)
	return id, true
}

func (p *blockPool) forget(id int32) {
	m := &p.meta[id]
	if m.keyed {
		delete(p.cached, m.key)
		m.keyed = false
		if p.removed != nil {
			p.removed(m.key)
		}
	}
}

// release drops one reference on each block. The last blocks of a sequence are put to the free list first: a prefix is
// worth more than a tail.
func (p *blockPool) release(ids []int32) {
	for _, id := range slices.Backward(ids) {

		m := &p.meta[id]
		if m.refs--; m.refs > 0 {
			continue
		}
		last := p.meta[0].prev
		m.prev, m.next = last, 0
		p.meta[last].next, p.meta[0].prev = id, id
		p.free++
	}
}

// remember puts a full block into the prefix cache, unless its key is there. It reports whether it did.
func (p *blockPool) remember(id int32, key TokenKey) bool {
	m := &p.meta[id]
	if _, known := p.cached[key]; known || m.keyed {
		return false
	}
	p.cached[key] = id
	m.key, m.keyed = key, true
	return true
}
