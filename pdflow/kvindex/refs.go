// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"math"
	"math/bits"
)

// refs maps the hashes of an engine to the index's keys, and counts how often each was announced: an engine that
// computes a prompt twice at once announces its blocks twice, and removes them twice. It is an open table in three
// arrays without pointers. A key is never 0, which marks a free place. One goroutine at a time may use it.
type refs struct {
	names  []uint64 // hasher.name of the engine's hashes
	keys   []uint64
	counts []uint16
	n      int
}

const refsLeast = 8

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

// key returns the key of a name, 0 if it is unknown.
func (t *refs) key(name uint64) uint64 {
	if at, found := t.find(name); found {
		return t.keys[at]
	}
	return 0
}

// add counts a name once more; fresh says that it was unknown. Where it was known with another key nothing changes and
// ok is false.
func (t *refs) add(name, key uint64, again bool) (fresh, ok bool) {
	at, found := t.find(name)
	if found {
		if t.keys[at] != key {
			return false, false
		}
		if !again {
			if t.counts[at] == math.MaxUint16 {
				return false, false
			}
			t.counts[at]++
		}
		return false, true
	}
	if (t.n+1)*5 > len(t.names)*4 {
		t.resize(max((t.n+1)*3/2, refsLeast))
		at, _ = t.find(name)
	}
	t.names[at], t.keys[at], t.counts[at] = name, key, 1
	t.n++
	return true, true
}

// drop counts a name once less, or sets its count if that is told (remaining >= 0). gone says that it is now unknown.
func (t *refs) drop(name uint64, remaining int) (key uint64, gone, known bool) {
	at, found := t.find(name)
	if !found {
		return 0, false, false
	}
	if key = t.keys[at]; remaining > 0 {
		t.counts[at] = uint16(min(remaining, math.MaxUint16))
		return key, false, true
	}
	if t.counts[at]--; t.counts[at] > 0 && remaining < 0 {
		return key, false, true
	}
	t.remove(at)
	if t.n*3 < len(t.names) && len(t.names) > 64 {
		t.resize(max((t.n+1)*3/2, refsLeast))
	}
	return key, true, true
}

// remove closes the gap: it moves back what follows and may lie there.
func (t *refs) remove(at int) {
	t.n--
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
			t.names[at], t.keys[at], t.counts[at] = t.names[next], t.keys[next], t.counts[next]
			at = next
		}
	}
	t.names[at], t.keys[at], t.counts[at] = 0, 0, 0
}

func (t *refs) resize(size int) {
	old := *t
	t.names, t.keys, t.counts = make([]uint64, size), make([]uint64, size), make([]uint16, size)
	for i, key := range old.keys {
		if key != 0 {
			at, _ := t.find(old.names[i])
			t.names[at], t.keys[at], t.counts[at] = old.names[i], key, old.counts[i]
		}
	}
}
