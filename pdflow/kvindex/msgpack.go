// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"encoding/binary"
	"math"
)

// reader reads msgpack from the bytes of a message, and keeps nothing of them. It reads what events need: a library's
// decoder takes each event's lists into memory of its own first. A fault is kept in bad, so that callers look once.
type reader struct {
	b   []byte
	bad bool
}

// kind is the type of a value.
type kind uint8

const (
	kindNone kind = iota // the end, or no msgpack
	kindNil
	kindBool
	kindInt   // num is its 64 bits
	kindFloat // num is the bits of a float64
	kindText  // n bytes follow, for text, bytes and extensions
	kindBytes
	kindExt
	kindArray // n values follow
	kindMap   // 2n values follow
)

// value is the head of a value.
type value struct {
	kind     kind
	negative bool
	num      uint64
	n        int
}

func (r *reader) fail() value {
	r.bad, r.b = true, nil
	return value{}
}

// uint takes a big-endian number of n bytes.
func (r *reader) uint(n int) (x uint64, ok bool) {
	if len(r.b) < n {
		r.fail()
		return 0, false
	}
	switch n {
	case 1:
		x = uint64(r.b[0])
	case 2:
		x = uint64(binary.BigEndian.Uint16(r.b))
	case 4:
		x = uint64(binary.BigEndian.Uint32(r.b))
	case 8:
		x = binary.BigEndian.Uint64(r.b)
	}
	r.b = r.b[n:]
	return x, true
}

// head takes a value's head: a number is whole then, and of all others the bytes or the members follow.
func (r *reader) head() value {
	if len(r.b) == 0 {
		return r.fail()
	}
	c := r.b[0]
	r.b = r.b[1:]
	switch {
	case c < 0x80:
		return value{kind: kindInt, num: uint64(c)}
	case c < 0x90:
		return r.sized(kindMap, uint64(c&0x0f))
	case c < 0xa0:
		return r.sized(kindArray, uint64(c&0x0f))
	case c < 0xc0:
		return r.sized(kindText, uint64(c&0x1f))
	case c >= 0xe0:
		return value{kind: kindInt, num: uint64(int64(int8(c))), negative: true}
	}
	switch c {
	case 0xc0:
		return value{kind: kindNil}
	case 0xc2, 0xc3:
		return value{kind: kindBool, num: uint64(c & 1)}
	case 0xc4, 0xc5, 0xc6:
		return r.long(kindBytes, 1<<(c-0xc4))
	case 0xc7, 0xc8, 0xc9:
		return r.long(kindExt, 1<<(c-0xc7))
	case 0xca:
		x, _ := r.uint(4)
		return value{kind: kindFloat, num: math.Float64bits(float64(math.Float32frombits(uint32(x))))}
	case 0xcb:
		x, _ := r.uint(8)
		return value{kind: kindFloat, num: x}
	case 0xcc, 0xcd, 0xce, 0xcf:
		x, _ := r.uint(1 << (c - 0xcc))
		return value{kind: kindInt, num: x}
	case 0xd0, 0xd1, 0xd2, 0xd3:
		x, _ := r.uint(1 << (c - 0xd0))
		shift := 64 - 8<<(c-0xd0)
		signed := int64(x<<shift) >> shift
		return value{kind: kindInt, num: uint64(signed), negative: signed < 0}
	case 0xd4, 0xd5, 0xd6, 0xd7, 0xd8:
		return r.sized(kindExt, 1<<(c-0xd4))
	case 0xd9, 0xda, 0xdb:
		return r.long(kindText, 1<<(c-0xd9))
	case 0xdc, 0xdd:
		return r.long(kindArray, 2<<(c-0xdc))
	case 0xde, 0xdf:
		return r.long(kindMap, 2<<(c-0xde))
	}
	return r.fail()
}

func (r *reader) long(k kind, bytes int) value {
	n, ok := r.uint(bytes)
	if !ok {
		return value{}
	}
	return r.sized(k, n)
}

// sized refuses a length that the bytes at hand cannot hold, so that what follows may rely on it.
func (r *reader) sized(k kind, n uint64) value {
	need := n
	switch k {
	case kindMap:
		need = 2 * n
	case kindExt:
		need = n + 1
	}
	if need > uint64(len(r.b)) {
		return r.fail()
	}
	if k == kindExt {
		n++ // its type is one more byte
	}
	return value{kind: k, n: int(n)}
}

// content takes the bytes of text, bytes or an extension.
func (r *reader) content(v value) []byte {
	if v.n > len(r.b) {
		r.fail()
		return nil
	}
	b := r.b[:v.n]
	r.b = r.b[v.n:]
	return b
}

// finish skips what follows a head, whatever is in it. It counts the values to come, in place of a call in a call for
// each level that hostile bytes have.
func (r *reader) finish(v value) {
	for left := 0; ; {
		switch v.kind {
		case kindText, kindBytes, kindExt:
			r.content(v)
		case kindArray:
			left += v.n
		case kindMap:
			left += 2 * v.n
		}
		if left == 0 || r.bad {
			return
		}
		if left > len(r.b) { // each value takes a byte
			r.fail()
			return
		}
		left--
		v = r.head()
	}
}

// raw takes a whole value as its bytes.
func (r *reader) raw() []byte {
	b := r.b
	r.finish(r.head())
	if r.bad {
		return nil
	}
	return b[:len(b)-len(r.b)]
}

// text takes a value that is text; ok is false if it is another one.
func (r *reader) text() (b []byte, ok bool) {
	v := r.head()
	if v.kind != kindText {
		r.finish(v)
		return nil, false
	}
	return r.content(v), !r.bad
}

// int takes a value that is a whole number and fits into 32 bits.
func (r *reader) int() (n int, ok bool) {
	v := r.head()
	if v.kind != kindInt || v.num > math.MaxInt32 {
		r.finish(v)
		return 0, false
	}
	return int(v.num), true
}
