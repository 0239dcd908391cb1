// SPDX-License-Identifier: Apache-2.0

package model

import "slices"

// blocks are the KV memory of an engine: reference counts, the free blocks in the order in which they will be used
// again, and the prefix cache over both. A free block keeps its content, and so its key, until it is used again. Blocks
// have the numbers 1 to n; 0 is both ends of the list of free blocks.
type blocks struct {
	meta    []block
	table   table
	free    int
	used    int
	bounded bool
}

type block struct {
	key        uint64 // 0: nobody finds it
	refs       int32
	prev, next int32 // among the free ones
}

func newBlocks(n int) *blocks {
	b := &blocks{bounded: n > 0}
	b.extend(n)
	return b
}

// extend adds free blocks.
func (b *blocks) extend(n int) {
	if len(b.meta) == 0 {
		b.meta = append(b.meta, block{})
	}
	for range n {
		id := int32(len(b.meta))
		b.meta = append(b.meta, block{})
		b.push(id)
	}
}

// push makes a block the last of the free ones.
func (b *blocks) push(id int32) {
	last := b.meta[0].prev
	b.meta[id].prev, b.meta[id].next = last, 0
	b.meta[last].next, b.meta[0].prev = id, id
	b.free++
}

func (b *blocks) hold(id int32) {
	m := &b.meta[id]
	if m.refs == 0 {
		b.meta[m.prev].next, b.meta[m.next].prev = m.next, m.prev
		b.free--
		b.used++
	}
	m.refs++
}

// room reports whether n more blocks can be taken.
func (b *blocks) room(n int) bool { return !b.bounded || n <= b.free }

// take gives the block that was free for longest, and forgets what it held. The caller has asked for room.
func (b *blocks) take() int32 {
	if b.free == 0 {
		b.extend(max(64, len(b.meta)))
	}
	id := b.meta[0].next
	b.hold(id)
	b.meta[id].key = 0
	return id
}

// match tells how many of the keys are cached, one after the other from the first on, and how many of these blocks are
// free.
func (b *blocks) match(keys []uint64) (hits, free int) {
	for _, key := range keys {
		id := b.lookup(key)
		if id == 0 {
			break
		}
		if b.meta[id].refs == 0 {
			free++
		}
		hits++
	}
	return hits, free
}

// release drops a reference of each block. The last blocks of a request become free first: others share its beginning,
// not its end.
func (b *blocks) release(ids []int32) {
	for _, id := range slices.Backward(ids) {
		m := &b.meta[id]
		if m.refs--; m.refs == 0 {
			b.used--
			b.push(id)
		}
	}
}

// table is a hash table from keys to blocks: open, with linear probing. Keys that follow one another lie side by side,
// so that a caller who numbers the blocks of a long text in a row has them in few lines of the processor's cache.
// Nothing is removed: an entry is stale if its block has another key by now, and goes when the table is made anew.
type table struct {
	slots []entry // a power of two
	count int     // with stale ones
}

type entry struct {
	key uint64 // 0: empty
	id  int32
}

func (t *table) slot(key uint64) int {
	return int((key>>16*0x9e3779b97f4a7c15>>32 + key) & uint64(len(t.slots)-1))
}

// find returns the entry of a key, or the empty one where it belongs.
func (t *table) find(key uint64) *entry {
	for i := t.slot(key); ; i = (i + 1) & (len(t.slots) - 1) {
		if e := &t.slots[i]; e.key == key || e.key == 0 {
			return e
		}
	}
}

// lookup returns the block of a key, 0 if there is none.
func (b *blocks) lookup(key uint64) int32 {
	if b.table.count == 0 || key == 0 {
		return 0
	}
	if e := b.table.find(key); e.key == key && b.meta[e.id].key == key {
		return e.id
	}
	return 0
}

// remember lets later requests find a block by its key, unless one is found by it already.
func (b *blocks) remember(id int32, key uint64) {
	t, m := &b.table, &b.meta[id]
	if key == 0 || m.key != 0 {
		return
	}
	if 2*t.count >= len(t.slots) {
		b.rebuild()
	}
	switch e := t.find(key); {
	case e.key == 0:
		*e = entry{key, id}
		t.count++
	case b.meta[e.id].key == key:
		return
	default:
		e.id = id
	}
	m.key = key
}

// rebuild makes the table anew, without stale entries and with room for as many new ones as there are blocks.
func (b *blocks) rebuild() {
	size := 64
	for size < 4*len(b.meta) {
		size *= 2
	}
	if len(b.table.slots) == size {
		clear(b.table.slots)
	} else {
		b.table.slots = make([]entry, size)
	}
	b.table.count = 0
	for id, m := range b.meta {
		if m.key != 0 {
			*b.table.find(m.key) = entry{m.key, int32(id)}
			b.table.count++
		}
	}
}
