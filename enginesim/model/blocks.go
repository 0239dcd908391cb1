// SPDX-License-Identifier: Apache-2.0

package model

import "slices"

// blocks are the KV memory of an engine: reference counts, the free blocks in the order in which they will be used
// again, and the prefix cache over both. A free block keeps its content, and so its key, until it is used again. Blocks
// have the numbers 1 to n; 0 is both ends of the list of free blocks.
type blocks struct {
	meta    []block
	cached  table
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
	if m := &b.meta[id]; m.key != 0 {
		b.cached.remove(m.key)
		m.key = 0
	}
	return id
}

// match tells how many of the keys are cached, one after the other from the first on, and how many of these blocks are
// free.
func (b *blocks) match(keys []uint64) (hits, free int) {
	for _, key := range keys {
		id := b.cached.get(key)
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

// remember lets later requests find a block by its key.
func (b *blocks) remember(id int32, key uint64) {
	if m := &b.meta[id]; key != 0 && m.key == 0 && b.cached.add(key, id) {
		m.key = key
	}
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

// table is a hash table from keys to blocks: open, with linear probing. Keys are hashes already.
type table struct {
	slots []entry // a power of two
	count int
}

type entry struct {
	key uint64 // 0: empty
	id  int32
}

func (t *table) slot(key uint64) int {
	return int(key * 0x9e3779b97f4a7c15 >> 32 & uint64(len(t.slots)-1))
}

// get returns the block of a key, 0 if there is none.
func (t *table) get(key uint64) int32 {
	if t.count == 0 || key == 0 {
		return 0
	}
	for i := t.slot(key); ; i = (i + 1) & (len(t.slots) - 1) {
		if e := t.slots[i]; e.key == key || e.key == 0 {
			return e.id
		}
	}
}

// add reports whether the key was new.
func (t *table) add(key uint64, id int32) bool {
	if 2*t.count >= len(t.slots) {
		old := t.slots
		t.slots, t.count = make([]entry, max(64, 2*len(old))), 0
		for _, e := range old {
			if e.key != 0 {
				t.add(e.key, e.id)
			}
		}
	}
	for i := t.slot(key); ; i = (i + 1) & (len(t.slots) - 1) {
		switch t.slots[i].key {
		case key:
			return false
		case 0:
			t.slots[i] = entry{key, id}
			t.count++
			return true
		}
	}
}

func (t *table) remove(key uint64) {
	mask := len(t.slots) - 1
	i := t.slot(key)
	for ; t.slots[i].key != key; i = (i + 1) & mask {
		if t.slots[i].key == 0 {
			return
		}
	}
	t.count--
	for j := i; ; { // close the gap: move back each entry that was put further because its slot was taken
		t.slots[i] = entry{}
		for {
			j = (j + 1) & mask
			if t.slots[j].key == 0 {
				return
			}
			if home := t.slot(t.slots[j].key); (j-home)&mask >= (j-i)&mask {
				break
			}
		}
		t.slots[i] = t.slots[j]
		i = j
	}
}
