// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// Eight bytes are tested at once in an ordinary register: a value repeated over the word is XORed in, which turns the
// wanted bytes to zero, and zeros marks each zero byte by its high bit. A mark above the lowest may be false (a borrow
// passes through), so only the lowest is used.
const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

func zeros(x uint64) uint64 { return (x - ones) & ^x & highs }

// quotesIn marks the quotes of a word.
func quotesIn(w uint64) uint64 { return zeros(w ^ ones*'"') }

// controlsIn marks the bytes below 0x20 of a word.
func controlsIn(w uint64) uint64 { return (w - ones*0x20) & ^w & highs }

// structuresIn marks quotes and brackets of both sorts. Setting the bits in which the four brackets differ makes them
// one value; y, Y, _ and DEL share it and are left to the caller, since outside of strings they hardly occur.
func structuresIn(w uint64) uint64 {
	return zeros((w|ones*0x26)^ones*0x7f) | quotesIn(w)
}

func word(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

// first is the place of the lowest mark in its word.
func first(marks uint64) int { return bits.TrailingZeros64(marks) >> 3 }

// nextStructure returns the place of the next quote or bracket (or a byte that structuresIn takes for one) at or after
// i, len(b) if there is none.
func nextStructure(b []byte, i int) int {
	// After a string mostly stands a colon or a comma and then, with luck, the next string: not worth a word.
	for n := 0; n < 3 && i < len(b); n++ {
		switch b[i] {
		case '"', '{', '}', '[', ']':
			return i
		}
		i++
	}
	for ; i+8 <= len(b); i += 8 {
		if m := structuresIn(word(b[i:])); m != 0 {
			return i + first(m)
		}
	}
	for ; i < len(b); i++ {
		switch b[i] {
		case '"', '{', '}', '[', ']':
			return i
		}
	}
	return i
}

// closingQuote returns the place after the string that opens at b[i], without looking at what the string holds; -1 if
// it does not end.
//
// Whether a quote is escaped is read off the run of backslashes before it. A run stands before one quote only, so no
// byte is counted twice and the whole stays linear, however the text is made.
func closingQuote(b []byte, i int) int {
	j := i + 1
	for {
		k := indexQuote(b, j)
		if k < 0 {
			return -1
		}
		if b[k-1] != '\\' {
			return k + 1
		}
		p := k - 1
		for b[p-1] == '\\' { // ends at the opening quote at the latest
			p--
		}
		if (k-p)&1 == 0 {
			return k + 1
		}
		// Escapes often come in rows; while they do, no search is needed.
		for j = k + 1; j+1 < len(b) && b[j] == '\\'; j += 2 {
		}
	}
}

// indexQuote finds the next quote. Most strings of a chat body are short (names, roles, types), so one word is tried
// before the call that is fast on long ones but dear to start; to try more costs more than it saves.
func indexQuote(b []byte, j int) int {
	if j+8 <= len(b) {
		if m := quotesIn(word(b[j:])); m != 0 {
			return j + first(m)
		}
		j += 8
	}
	k := bytes.IndexByte(b[j:], '"')
	if k < 0 {
		return -1
	}
	return j + k
}

// plainEnd returns the place after the string that opens at b[i], if it is a short one of printable ASCII without
// escapes, as nearly all names are; else -1, which says nothing about the string.
func plainEnd(b []byte, i int) int {
	i++
	for near := min(len(b)-8, i+32); i <= near; i += 8 {
		w := word(b[i:])
		if m := quotesIn(w) | zeros(w^ones*'\\') | controlsIn(w) | w&highs; m != 0 {
			if i += first(m); b[i] == '"' {
				return i + 1
			}
			return -1
		}
	}
	return -1
}

// Bounds of the stretch that nextSpecial searches with the wide instructions. It doubles while nothing is found, so
// that a search wastes no more than what has already been passed, and stays within the first cache.
const (
	minStretch = 128
	maxStretch = 8 << 10
)

// nextSpecial returns the place of the next quote, backslash or control character at or after i, len(b) if there is
// none.
func nextSpecial(b []byte, i int) int {
	for near := min(len(b), i+64); i < near; {
		if i+8 > len(b) {
			for ; i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= 0x20; i++ {
			}
			return i
		}
		w := word(b[i:])
		if m := quotesIn(w) | zeros(w^ones*'\\') | controlsIn(w); m != 0 {
			return i + first(m)
		}
		i += 8
	}
	for size := minStretch; i < len(b); size = min(2*size, maxStretch) {
		all := b[i:min(len(b), i+size)]
		part := all
		if k := bytes.IndexByte(part, '"'); k >= 0 {
			part = part[:k]
		}
		if k := bytes.IndexByte(part, '\\'); k >= 0 {
			part = part[:k]
		}
		part = part[:nextControl(part)]
		i += len(part)
		if len(part) < len(all) {
			return i
		}
	}
	return i
}

// nextControl returns the place of the first byte below 0x20, len(b) if there is none.
func nextControl(b []byte) int {
	i := 0
	for ; i+32 <= len(b); i += 32 {
		s := b[i : i+32 : i+32]
		m := controlsIn(word(s)) | controlsIn(word(s[8:])) | controlsIn(word(s[16:])) | controlsIn(word(s[24:]))
		if m != 0 {
			break
		}
	}
	for ; i < len(b) && b[i] >= 0x20; i++ {
	}
	return i
}
