// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"math"
	"math/bits"
)

// refs is what a column holds, by the hashes of its engine. For each it has the index's key, and how often it was
// announced: an engine that computes a prompt twice at once announces its blocks twice, and removes them twice.
//
// It also knows whether some block is held without the block before it. Engines evict the last blocks of a prompt
// first, so that is rare, and without it Match can look for a prefix by halves. A block that is gone while others
// follow it stays as a ghost: it is not held (its count is 0), and goes when the last of those that follow it goes.
//
// It is an open table in arrays without pointers. One goroutine at a time may use it.
type refs struct {
	names  []uint64 // hasher.name of the engine's hashes
	keys   []uint64 // 0: a free place
	ups    []uint32 // with downs: 40 bits of the name of the block before; 0 for a prompt's first block
	downs  []uint8
	counts []uint16 // 0: a ghost
	kids   []uint16 // blocks that follow, ghosts too; it stays at its maximum

	used    int // entries
	ghosts  int
	blurred bool // a block before another could not be told by 40 bits of its name
}

const (
	refsLeast = 8
	upShift   = 24
)

// link is the block before another. Its zero value is that of a prompt's first block.
type link struct{ name, key uint64 }

// closed reports whether for each block that is held the block before it is held, too.
func (t *refs) closed() bool { return t.ghosts == 0 && !t.blurred }

func (t *refs) home(name uint64) int {
	hi, _ := bits.Mul64(name, uint64(len(t.names)))
	return int(hi)
}

// find returns the place of a name, or the free one where it would be.
func (t *refs) find(name uint64) (at int, found bool) {
	if len(t.names) == 0 {
		return 0, false
	}
	for at = t.home(name); t.keys[at] != 0; {
		if t.names[at] == name {
			return at, true
		}
		if at++; at == len(t.names) {
			at = 0
		}
	}
	return at, false
}

// key returns the key of a name, also of a ghost's; 0 if it is unknown.
func (t *refs) key(name uint64) uint64 {
	if at, found := t.find(name); found {
		return t.keys[at]
	}
	return 0
}

// holds reports whether a name is held.
func (t *refs) holds(name uint64) bool {
	at, found := t.find(name)
	return found && t.counts[at] > 0
}

// up returns 40 bits of the name of the block before.
func (t *refs) up(at int) uint64 { return uint64(t.ups[at])<<8 | uint64(t.downs[at]) }

// findUp returns the place of an entry by 40 bits of its name.
func (t *refs) findUp(up uint64) (at int, found bool) {
	for at = t.home(up << upShift); t.keys[at] != 0; {
		if t.names[at]>>upShift == up {
			return at, true
		}
		if at++; at == len(t.names) {
			at = 0
		}
	}
	return 0, false
}

// before returns the block before a name's; ok is false where that cannot be told.
func (t *refs) before(name uint64) (before link, ok bool) {
	at, found := t.find(name)
	if !found {
		return link{}, false
	}
	up := t.up(at)
	if up == 0 {
		return link{}, true
	}
	if at, found = t.findUp(up); !found || t.blurred {
		return link{}, false
	}
	return link{t.names[at], t.keys[at]}, true
}

// add counts a name once more, or not if it is only told again; fresh says that it was not held. Where it is known with
// another key, or as often as can be counted, nothing changes and ok is false.
func (t *refs) add(name, key uint64, before link, again bool) (fresh, ok bool) {
	t.room(2)
	at, found := t.find(name)
	switch {
	case !found:
		at = t.insert(name, key, 1)
	case t.keys[at] != key:
		return false, false
	case t.counts[at] == 0:
		t.counts[at] = 1
		t.ghosts--
	case again:
		return false, true
	case t.counts[at] == math.MaxUint16:
		return false, false
	default:
		t.counts[at]++
		return false, true
	}
	if before.key != 0 && t.up(at) == 0 { // a ghost may not have been told of it
		t.follow(at, before)
	}
	return true, true
}

// room makes room for n entries.
func (t *refs) room(n int) {
	if (t.used+n)*5 > len(t.names)*4 {
		t.resize(max((t.used+n)*3/2, refsLeast))
	}
}

// follow notes the block before an entry's.
func (t *refs) follow(at int, before link) {
	up := before.name >> upShift
	t.ups[at], t.downs[at] = uint32(up>>8), uint8(up)
	b, found := t.find(before.name)
	if !found { // it is held in another medium
		b = t.insert(before.name, before.key, 0)
		t.ghosts++
	}
	if t.kids[b] < math.MaxUint16 {
		t.kids[b]++
	}
	t.blurred = t.blurred || up == 0
}

// insert adds an entry for which there is room.
func (t *refs) insert(name, key uint64, count uint16) int {
	at := t.home(name)
	for t.keys[at] != 0 {
		t.blurred = t.blurred || t.names[at]>>upShift == name>>upShift
		if at++; at == len(t.names) {
			at = 0
		}
	}
	t.names[at], t.keys[at], t.counts[at], t.kids[at] = name, key, count, 0
	t.ups[at], t.downs[at] = 0, 0
	t.used++
	return at
}

// drop counts a name once less, or sets its count if that is told (remaining >= 0). gone says that it is not held now.
func (t *refs) drop(name uint64, remaining int) (key uint64, gone, known bool) {
	at, found := t.find(name)
	if !found || t.counts[at] == 0 {
		return 0, false, false
	}
	if key = t.keys[at]; remaining > 0 {
		t.counts[at] = uint16(min(remaining, math.MaxUint16))
		return key, false, true
	}
	if t.counts[at]--; t.counts[at] > 0 && remaining < 0 {
		return key, false, true
	}
	t.counts[at] = 0
	t.ghosts++
	t.bury(at)
	if t.used*3 < len(t.names) && len(t.names) > 64 {
		t.resize(max((t.used+2)*3/2, refsLeast))
	}
	t.blurred = t.blurred && t.used > 0
	return key, true, true
}

// bury removes a ghost that nothing follows, and then the one before it if nothing follows that, and so on.
func (t *refs) bury(at int) {
	for t.counts[at] == 0 && t.kids[at] == 0 {
		up := t.up(at)
		t.remove(at)
		t.ghosts--
		if up == 0 {
			return
		}
		var found bool
		if at, found = t.findUp(up); !found {
			t.blurred = true
			return
		}
		if t.kids[at] == math.MaxUint16 { // more may follow than it can count
			return
		}
		t.kids[at]--
	}
}

// remove closes the gap: it moves back what follows and may lie there.
func (t *refs) remove(at int) {
	t.used--
	for next := at; ; {
		if next++; next == len(t.names) {
			next = 0
		}
		if t.keys[next] == 0 {
			break
		}
		want := t.home(t.names[next])
		// What follows stays if its home lies after the gap: between the gap and it, going round.
		if at < next && (want <= at || want > next) || at > next && want <= at && want > next {
			t.move(at, t, next)
			at = next
		}
	}
	t.keys[at] = 0
}

func (t *refs) move(to int, from *refs, at int) {
	t.names[to], t.keys[to], t.ups[to], t.downs[to] = from.names[at], from.keys[at], from.ups[at], from.downs[at]
	t.counts[to], t.kids[to] = from.counts[at], from.kids[at]
}

func (t *refs) resize(size int) {
	old := *t
	t.names, t.keys = make([]uint64, size), make([]uint64, size)
	t.ups, t.downs = make([]uint32, size), make([]uint8, size)
	t.counts, t.kids = make([]uint16, size), make([]uint16, size)
	for i, key := range old.keys {
		if key != 0 {
			at, _ := t.find(old.names[i])
			t.move(at, &old, i)
		}
	}
}
