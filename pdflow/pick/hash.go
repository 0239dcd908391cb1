// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"encoding/binary"
	"math/bits"
)

// The hash is the package's own, since maphash differs from process to process, and policies must follow from their
// seed. Nothing but speed depends on its quality, and the seed is secret where clients choose what is hashed.

const (
	mixA = 0x9e3779b97f4a7c15
	mixB = 0xd6e8feb86659fd93
)

// mix folds a product of 128 bits.
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

// scramble is the finalizer of splitmix64: neighbouring numbers come out far apart.
func scramble(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
