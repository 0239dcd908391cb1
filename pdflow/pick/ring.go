// SPDX-License-Identifier: Apache-2.0

package pick

import "slices"

// ring is a consistent hash: points of the targets on a circle, sorted. An entry is the point's hash with the target's
// index in its low bits, so that 8 bytes a point are all that it costs.
type ring []uint64

const (
	ringIndexBits = 24
	ringWalk      = 64 // steps from a key to a target that takes it
)

// newRing gives each target as many points as make the shares of a small list even; a large one is made even by the
// bound. When the number changes, points are halved, and the others remain where they are.
func newRing(targets []*target) ring {
	points := 64
	for n := len(targets); n > 512 && points > 8; n /= 2 {
		points /= 2
	}
	r := make(ring, 0, points*len(targets))
	for i, t := range targets {
		for k := range points {
			r = append(r, scramble(t.slot.hash+uint64(k)*mixA)&^(1<<ringIndexBits-1)|uint64(i)&(1<<ringIndexBits-1))
		}
	}
	slices.Sort(r)
	return r
}

// find returns the first target from the key's place on that is good and not over its bound, nil if none is near.
func (r ring) find(l *list, key uint64, q *query) *target {
	if len(r) == 0 {
		return nil
	}
	start, _ := slices.BinarySearch(r, key)
	for i := range min(ringWalk, len(r)) {
		t := l.targets[r[(start+i)%len(r)]&(1<<ringIndexBits-1)]
		if q.rank(t) == good && !q.over(l, t) {
			return t
		}
	}
	return nil
}
