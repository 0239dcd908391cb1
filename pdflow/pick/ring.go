// SPDX-License-Identifier: Apache-2.0

package pick

import "slices"

// ring is a consistent hash: a sorted list of the targets' points on a circle. An entry is a point's hash with the
// target's index in its low bits, so a point costs 8 bytes.
type ring []uint64

const (
	ringIndexBits = 24
	ringWalk      = 64 // steps from a key to a target that takes it
)

// newRing gives each target the same number of points, enough to make the shares of a small list even. In a large list
// the bound evens out the shares. When the number of points changes, it is halved, and the remaining points keep their
// places.
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

// find returns the first target after the key's place that is good and not over its bound; nil if ringWalk steps find
// none.
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
