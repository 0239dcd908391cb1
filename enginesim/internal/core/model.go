// SPDX-License-Identifier: Apache-2.0

package core

import (
	"encoding/binary"
	"math/bits"
)

// Special tokens of the toy tokenizer. Token ids 0 to 255 are bytes; these follow, as in the tiny model that the
// recorded exchanges were made with: 256 begins a text, and 258 pads it, which no engine here does.
const (
	TokenEOS     = 257
	TokenIMStart = 259
	TokenIMEnd   = 260
	Vocabulary   = 261
)

const (
	mixA = 0x9e3779b97f4a7c15
	mixB = 0xd6e8feb86659fd93
)

// Mix folds two words into one; it is not cryptographic, only well spread.
func Mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^mixA, b^mixB)
	return hi ^ lo
}

// toyModel is the deterministic toy model. The KV of one token is width bytes: the first word is the state of the
// sequence up to and including that token, taken from the KV of the token before as it lies in memory, and the rest is
// spread from it. So a block's content follows from its tokens, from what the previous block really holds, and from the
// seed.
type toyModel struct {
	seed  uint64
	width int // bytes of KV per token, a multiple of 8
}

// start is the state before the first token.
func (m toyModel) start() uint64 { return Mix(m.seed, mixB) }

// write puts the KV of token into entry and returns the state it holds.
func (m toyModel) write(entry []byte, before uint64, token int32) uint64 {
	state := Mix(before, uint64(uint32(token))+m.seed)
	binary.LittleEndian.PutUint64(entry, state)
	for at := 8; at < m.width; at += 8 {
		binary.LittleEndian.PutUint64(entry[at:], Mix(state, uint64(at)))
	}
	return state
}

// fold takes the KV of whole tokens into a running digest. Every byte counts: a block that is stale, swapped or another
// prompt's changes all that follows.
func (m toyModel) fold(digest uint64, entries []byte) uint64 {
	for len(entries) >= 8 {
		digest = Mix(digest, binary.LittleEndian.Uint64(entries))
		entries = entries[8:]
	}
	return digest
}

// state reads the state that an entry holds.
func (m toyModel) state(entry []byte) uint64 { return binary.LittleEndian.Uint64(entry) }

// next is the token after a sequence with this digest: always printable ASCII, so a request ends by its limit or its
// stop strings alone. variant is 0 for the greedy response; children of n > 1 and seeded sampling use other values.
func (m toyModel) next(digest, variant uint64) int32 {
	h := Mix(digest, m.seed+1)
	if variant != 0 {
		h = Mix(h, variant)
	}
	return int32(32 + h%95)
}

// digestStart is the digest of an empty sequence.
func (m toyModel) digestStart() uint64 { return Mix(m.seed, 1) }

// Tokenise gives one token per byte.
func Tokenise(text string) []int32 {
	tokens := make([]int32, len(text))
	for i := range len(text) {
		tokens[i] = int32(text[i])
	}
	return tokens
}

// AppendText appends the tokens of a text.
func AppendText(tokens []int32, text string) []int32 {
	for i := range len(text) {
		tokens = append(tokens, int32(text[i]))
	}
	return tokens
}

// Detokenise turns tokens back into text; special tokens are left out.
func Detokenise(tokens []int32) string {
	b := make([]byte, 0, len(tokens))
	for _, t := range tokens {
		if t >= 0 && t < 256 {
			b = append(b, byte(t))
		}
	}
	return string(b)
}

// TokenKey names a sequence of tokens: the key of a [LookupBuffer].
type TokenKey [2]uint64

// KeyOf is the key of tokens. Equal sequences have equal keys; different ones differ but for an accident of 128 bits.
func KeyOf(tokens []int32) TokenKey { return TokenKey{}.Extend(tokens) }

// Extend is the key of tokens that follow a sequence with the key k: the chain that the prefix cache is looked up by.
func (k TokenKey) Extend(tokens []int32) TokenKey {
	a, b := Mix(k[0], mixB), Mix(k[1], mixA)
	for _, t := range tokens {
		a = Mix(a, uint64(uint32(t))+1)
		b = Mix(b+uint64(uint32(t)), a)
	}
	return TokenKey{a, b}
}

func (k TokenKey) salted(salt string) TokenKey {
	if salt == "" {
		return k
	}
	return k.Extend(Tokenise(salt))
}
