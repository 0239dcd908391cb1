// SPDX-License-Identifier: Apache-2.0

package record

import (
	"math/bits"
	"strings"
)

// digits are the characters of packed bits: those that a JSON string holds as they are. Two of them hold 13 bits, which
// is 8 % less than base64 needs.
const digits = "!#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]^_`abcdefghijklmnopqrstuvwxyz{|}~"

const pairBits = 13

// packer writes numbers of any count of bits, the lowest bit first.
type packer struct {
	out []byte
	acc uint64
	n   int // bits of acc, fewer than pairBits
}

// bits writes the n lowest bits of v.
func (p *packer) bits(v uint64, n int) {
	for n > 0 {
		take := min(n, 48)
		p.acc |= v & (1<<take - 1) << p.n
		p.n += take
		for ; p.n >= pairBits; p.n -= pairBits {
			p.pair()
		}
		v >>= take
		n -= take
	}
}

func (p *packer) pair() {
	d := p.acc & (1<<pairBits - 1)
	p.out = append(p.out, digits[d%uint64(len(digits))], digits[d/uint64(len(digits))])
	p.acc >>= pairBits
}

// number writes v in groups of four bits, each with a bit that says whether another one follows.
func (p *packer) number(v uint64) {
	for ; v > 15; v >>= 4 {
		p.bits(v&15|16, 5)
	}
	p.bits(v, 5)
}

func (p *packer) bool(v bool) {
	if v {
		p.bits(1, 1)
		return
	}
	p.bits(0, 1)
}

func (p *packer) end() {
	if p.n > 0 {
		p.pair()
	}
	p.n = 0
}

// unpacker reads what a packer has written.
type unpacker struct {
	in    string
	acc   uint64
	n     int
	wrong bool // there were too few characters, or others
	lacks bool // a line that is referred to
}

func (u *unpacker) bits(n int) (v uint64) {
	for at := 0; n > 0; {
		take := min(n, 48)
		for u.n < take {
			if len(u.in) < 2 {
				u.wrong = true
				return 0
			}
			low, high := strings.IndexByte(digits, u.in[0]), strings.IndexByte(digits, u.in[1])
			d := low + high*len(digits)
			if low < 0 || high < 0 || d >= 1<<pairBits {
				u.wrong = true
				return 0
			}
			u.acc |= uint64(d) << u.n
			u.n += pairBits
			u.in = u.in[2:]
		}
		v |= u.acc & (1<<take - 1) << at
		u.acc >>= take
		u.n -= take
		at += take
		n -= take
	}
	return v
}

func (u *unpacker) number() (v uint64) {
	for at := 0; at < 64; at += 4 {
		d := u.bits(5)
		v |= d & 15 << at
		if d < 16 {
			return v
		}
	}
	u.wrong = true
	return 0
}

// upTo reads a number of a list's entries, which may not be more than most.
func (u *unpacker) upTo(most int) int {
	v := u.number()
	if v > uint64(most) {
		u.wrong = true
		return 0
	}
	return int(v)
}

func (u *unpacker) bool() bool { return u.bits(1) == 1 }

const (
	codeBits = 8  // significant ones of what code holds
	rawWidth = 15 // of a column of whole numbers that have no code
)

// code holds a number with few significant bits in fewer bits than it has: small ones as they are, then an exponent
// with the bits below the highest one. ok is false if it would lose some.
func code(v uint64) (c uint64, ok bool) {
	e := max(bits.Len64(v)-codeBits, 0)
	c = uint64(e)<<(codeBits-1) + v>>e
	return c, decode(c) == v && c < 1<<(rawWidth-1)
}

func decode(c uint64) uint64 {
	const half = 1 << (codeBits - 1)
	if c < 2*half {
		return c
	}
	e := c/half - 1
	return (c - e*half) << min(e, 64)
}
