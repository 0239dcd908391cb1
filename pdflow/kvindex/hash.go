// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"crypto/rand"
	"encoding/binary"
	"math/bits"
)

// hasher makes the keys of the index. A key stands for a block and all blocks before it.
//
// A piece of 16 tokens is hashed by NH, the universal hash of UMAC and VMAC: two different pieces of one length have
// the same 128 bits with a probability of 2^-64, whatever they are, as long as the secret is one. They are then mixed
// into the key of the block before by multiplications to 128 bits, folded to 64. Two prompts of 10^7 blocks that are
// looked up look alike with a probability near 10^-12. It would cost a wrong choice of an engine, and nothing else:
// engines compare what they hold by hashes of their own.
//
// maphash does the same with two copies of each block, and cannot go on from a key.
type hasher struct {
	piece  [8]uint64 // the secrets of NH
	tokens [4]uint64 // each kind of input has secrets of its own, so that none can pass for another
	bytes  [4]uint64
	names  [4]uint64
}

const pieceTokens = 16

func newHasher() *hasher {
	var random [20 * 8]byte
	_, _ = rand.Read(random[:]) // crypto/rand ends the program rather than fail
	h, rest := &hasher{}, random[:]
	for _, secrets := range [...][]uint64{h.piece[:], h.tokens[:], h.bytes[:], h.names[:]} {
		for i := range secrets {
			secrets[i], rest = binary.LittleEndian.Uint64(rest), rest[8:]
		}
	}
	return h
}

// fold multiplies to 128 bits and folds the halves.
func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// mix goes on from a key with 128 bits.
func mix(secret *[4]uint64, key, lo, hi uint64) uint64 {
	return fold(fold(lo^secret[0], hi^secret[1])^secret[2], key+secret[3])
}

// whole goes on with 16 tokens.
func (h *hasher) whole(key uint64, t *[pieceTokens]uint32) uint64 {
	k := &h.piece
	h0, l0 := bits.Mul64(pair(t[0], t[1])+k[0], pair(t[2], t[3])+k[1])
	h1, l1 := bits.Mul64(pair(t[4], t[5])+k[2], pair(t[6], t[7])+k[3])
	h2, l2 := bits.Mul64(pair(t[8], t[9])+k[4], pair(t[10], t[11])+k[5])
	h3, l3 := bits.Mul64(pair(t[12], t[13])+k[6], pair(t[14], t[15])+k[7])
	var c uint64
	l0, c = bits.Add64(l0, l1, 0)
	h0, _ = bits.Add64(h0, h1, c)
	l2, c = bits.Add64(l2, l3, 0)
	h2, _ = bits.Add64(h2, h3, c)
	l0, c = bits.Add64(l0, l2, 0)
	h0, _ = bits.Add64(h0, h2, c)
	return mix(&h.tokens, key, l0, h0)
}

func pair(a, b uint32) uint64 { return uint64(a) | uint64(b)<<32 }

// run goes on with tokens. How many there are must follow from what the key is used for: a table has blocks of one
// size.
func (h *hasher) run(key uint64, tokens []uint32) uint64 {
	for len(tokens) >= pieceTokens {
		key = h.whole(key, (*[pieceTokens]uint32)(tokens))
		tokens = tokens[pieceTokens:]
	}
	if len(tokens) > 0 {
		var last [pieceTokens]uint32
		copy(last[:], tokens)
		key = h.whole(key, &last)
	}
	return key
}

// text goes on with bytes, such as a salt. The kind tells apart what has the same bytes.
func (h *hasher) text(key uint64, kind uint64, b []byte) uint64 {
	key = mix(&h.bytes, key, kind, uint64(len(b)))
	for len(b) >= 16 {
		key = mix(&h.bytes, key, binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:]))
		b = b[16:]
	}
	if len(b) > 0 {
		var last [16]byte
		copy(last[:], b)
		key = mix(&h.bytes, key, binary.LittleEndian.Uint64(last[:]), binary.LittleEndian.Uint64(last[8:]))
	}
	return key
}

// The kinds of text.
const (
	textLoRA = iota + 1
	textExtra
	textMedia
	textOther
	textHash
	textPayload
)

// root is the key before the first block.
func (h *hasher) root(lora []byte) uint64 {
	if len(lora) == 0 {
		return h.names[0]
	}
	return h.text(h.names[0], textLoRA, lora)
}

// media goes on with an item of a prompt that covers a block, as its identifier and where it begins, counted from the
// block's begin.
func (h *hasher) media(key uint64, id []byte, offset int64) uint64 {
	return h.text(mix(&h.bytes, key, textMedia, uint64(offset)), textMedia, id)
}

// name places a hash of an engine in a table. Its secret is needed because engines' hashes have no secret: a client
// could search prompts whose hashes crowd a part of a table.
func (h *hasher) name(hash uint64) uint64 { return fold(hash^h.names[1], h.names[2]|1) ^ h.names[3] }
