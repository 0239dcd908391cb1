// SPDX-License-Identifier: Apache-2.0

package model

import "math"

// Histogram counts times in buckets that are 1.6 % wide or less. The zero value is empty.
type Histogram struct {
	buckets []int64
	count   int64
}

const (
	subBits   = 6   // buckets of an octave: 64
	octaves   = 64  // from 2^-40 s on
	lowestExp = -40 // about a picosecond
)

func bucketOf(seconds float64) int {
	const lowest = (lowestExp + 1023) << subBits
	if !(seconds > 0) {
		return 0
	}
	return min(max(int(math.Float64bits(seconds)>>(52-subBits))-lowest, 0), octaves<<subBits-1)
}

// Add counts n times.
func (h *Histogram) Add(seconds float64, n int64) {
	if h.buckets == nil {
		h.buckets = make([]int64, octaves<<subBits)
	}
	h.buckets[bucketOf(seconds)] += n
	h.count += n
}

// Merge adds what another histogram has counted.
func (h *Histogram) Merge(other *Histogram) {
	if other.count == 0 {
		return
	}
	h.Add(0, 0)
	for i, n := range other.buckets {
		h.buckets[i] += n
	}
	h.count += other.count
}

// Count is how many times were counted.
func (h *Histogram) Count() int64 { return h.count }

// Quantile is a time that a share q of the counted times does not pass, within 0.8 %; 0 if none was counted.
func (h *Histogram) Quantile(q float64) float64 {
	if h.count == 0 {
		return 0
	}
	rank := int64(q * float64(h.count-1))
	for i, n := range h.buckets {
		if rank -= n; rank < 0 {
			low := math.Float64frombits(uint64(i+(lowestExp+1023)<<subBits) << (52 - subBits))
			high := math.Float64frombits(uint64(i+1+(lowestExp+1023)<<subBits) << (52 - subBits))
			return (low + high) / 2
		}
	}
	return 0
}
