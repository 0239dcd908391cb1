// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"encoding/binary"
	"math/bits"
)

// This package has its own hash because maphash gives other values in each process, and a policy's choices must follow
// from its seed. A bad hash would only cost speed. The seed is secret where clients choose what is hashed.

const (
	mixA = 0x9e3779b97f4a7c15
	mixB = 0xd6e8feb86659fd93
)

// mix multiplies to 128 bits and folds the two halves with xor.
func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^mixA, b^mixB)
	return hi ^ lo
}

// hashBytes continues seed with the bytes of b.
func hashBytes(seed uint64, b []byte) uint64 {
	h := mix(seed, uint64(len(b)))
	for len(b) >= 8 {
		h = mix(h, binary.LittleEndian.Uint64(b))
		b = b[8:]
	}
	if len(b) > 0 {
		var last [8]byte
		copy(last[:], b)
		h = mix(h, binary.LittleEndian.Uint64(last[:]))
	}
	return scramble(h)
}

// scramble is the finalizer of splitmix64: it maps neighbouring numbers to numbers far apart.
func scramble(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
