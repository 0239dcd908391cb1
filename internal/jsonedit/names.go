// SPDX-License-Identifier: Apache-2.0

package jsonedit

import "hash/maphash"

// fewMembers is up to how many members are searched one by one. Beyond it a table is kept, or a body of thousands of
// members would cost the square of their number.
const fewMembers = 16

// nameTable finds members by name: an open hash table of indices, keyed afresh for each Doc so that no client can
// choose names that collide. It holds no names, only where they are.
type nameTable struct {
	seed  maphash.Seed
	keyed bool
	slots []int32 // index + 1; 0 is free; the length is a power of two
	used  int
}

func (t *nameTable) clear() {
	if t.used > 0 {
		clear(t.slots)
		t.used = 0
	}
}

func (t *nameTable) shrink(limit int) {
	if len(t.slots) > limit {
		t.slots = nil
	}
}

func (t *nameTable) put(hash uint64, index int) {
	mask := uint64(len(t.slots) - 1)
	at := hash & mask
	for t.slots[at] != 0 {
		at = (at + 1) & mask
	}
	t.slots[at] = int32(index + 1)
	t.used++
}

// index enters the last member, whose name is given, into the table, and all members if there was none.
func (d *Doc) index(name []byte) {
	n, t := len(d.members), &d.names
	if t.used > 0 && 2*n <= len(t.slots) {
		t.put(maphash.Bytes(t.seed, name), n-1)
		return
	}
	if !t.keyed {
		t.seed, t.keyed = maphash.MakeSeed(), true
	}
	if 2*n > len(t.slots) {
		t.slots = make([]int32, max(4*fewMembers, 2*len(t.slots)))
	}
	t.used = 0
	for i := range d.members {
		t.put(maphash.Bytes(t.seed, d.nameOf(&d.members[i])), i)
	}
}

// find returns the index of the member with that name, -1 if there is none.
func find[T string | []byte](d *Doc, name T) int {
	sketch := sketchOf(name)
	if d.filter&bitOf(sketch) == 0 {
		return -1 // as most lookups end: requests have few of the members that engines know
	}
	t := &d.names
	if t.used == 0 {
		for i := range d.members {
			if m := &d.members[i]; m.sketch == sketch && string(d.nameOf(m)) == string(name) {
				return i
			}
		}
		return -1
	}
	mask := uint64(len(t.slots) - 1)
	for at := hashOf(t.seed, name) & mask; t.slots[at] != 0; at = (at + 1) & mask {
		i := int(t.slots[at] - 1)
		if string(d.nameOf(&d.members[i])) == string(name) {
			return i
		}
	}
	return -1
}

// hashOf gives text and bytes of the same content the same hash.
func hashOf[T string | []byte](seed maphash.Seed, name T) uint64 {
	switch v := any(name).(type) {
	case string:
		return maphash.String(seed, v)
	case []byte:
		return maphash.Bytes(seed, v)
	}
	return 0
}

// sketchOf tells most names apart in one comparison: length, first and last byte.
func sketchOf[T string | []byte](name T) uint32 {
	n := len(name)
	if n == 0 {
		return 0
	}
	return uint32(n)<<16 | uint32(name[0])<<8 | uint32(name[n-1])
}

// bitOf spreads sketches over the bits of a filter that says which names an object cannot have.
func bitOf(sketch uint32) uint64 { return 1 << (uint64(sketch) * 0x9e3779b97f4a7c15 >> 58) }
