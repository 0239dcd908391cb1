// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"hash/maphash"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

const (
	block      = 256 // bytes of a prompt: the shortest prefix that is hashed
	levelsMost = 12  // prefixes of a prompt, each twice as long as the one before
	firstBits  = 40  // of a hash that are kept, of the shortest prefix
	laterBits  = 24  // of the others

	lookMost = 8 << 10 // bytes in which the first message of a user is looked for
)

// text returns the value that has a request's prompt.
func text(r *connector.ClientRequest) []byte {
	for _, name := range [...]string{r.API.PromptMember(), "input_ids"} {
		if raw, ok := r.Field(name); ok && name != "" {
			return raw
		}
	}
	return r.Body()
}

// family returns what decides whether a request is recorded, so that the turns of a conversation are recorded together:
// the beginning of the first message of a user, or of the prompt where there is none. Many conversations have the same
// message of the system before that, and would all be recorded, or none.
func family(in *pdflow.PickInput) []byte {
	if in.Request == nil {
		return []byte(in.RequestID)
	}
	raw := text(in.Request)
	raw = raw[:min(len(raw), lookMost)]
	i := bytes.Index(raw, []byte(`"user"`))
	if i < 0 {
		return raw[:min(len(raw), block)]
	}
	// Its text stands behind that, or before, where members are in the order of their names.
	before := raw[max(0, i-block):i]
	before = before[bytes.LastIndexByte(before, '{')+1:]
	raw = raw[i-len(before) : min(len(raw), i+block)]
	if end := bytes.IndexByte(raw[len(before):], '}'); end >= 0 { // of the message, behind which the next turn goes on
		raw = raw[:len(before)+end]
	}
	return raw
}

// sampler says which requests are recorded.
type sampler struct {
	seed  maphash.Seed
	below uint64
	all   bool
}

func newSampler(share float64) sampler {
	return sampler{seed: maphash.MakeSeed(), below: uint64(min(max(share, 0), 1) * (1 << 63)), all: share >= 1}
}

func (s *sampler) takes(in *pdflow.PickInput) bool {
	return s.all || s.below > 0 && maphash.Bytes(s.seed, family(in))>>1 < s.below
}

// beginnings are the hashes of a prompt's prefixes, as a line keeps them.
type beginnings struct {
	size int // bytes of the prompt
	bits [levelsMost]uint64
	n    int
}

// hasher hashes prompts with a key. It is not safe for concurrent use.
type hasher struct{ mac hash.Hash }

func newHasher(key []byte) hasher { return hasher{hmac.New(sha256.New, key)} }

// read hashes the beginnings of a request's prompt. What chat templates put before the messages comes first.
func (h hasher) read(r *connector.ClientRequest, out *beginnings) {
	*out = beginnings{}
	if r == nil {
		return
	}
	h.mac.Reset()
	h.mac.Write([]byte(r.Model)) // engines' caches are of one model; a hash never fails
	next := block
	add := func(raw []byte) {
		for len(raw) > 0 && out.n < levelsMost {
			part := raw[:min(len(raw), next-out.size)]
			h.mac.Write(part)
			raw = raw[len(part):]
			if out.size += len(part); out.size == next {
				var sum [sha256.Size]byte
				bits := binary.LittleEndian.Uint64(h.mac.Sum(sum[:0]))
				out.bits[out.n] = bits & (1<<levelBits(out.n) - 1)
				out.n++
				next *= 2
			}
		}
		out.size += len(raw)
	}
	for _, name := range [...]string{"tools", "system", "instructions"} {
		if raw, ok := r.Field(name); ok {
			add(raw)
		}
	}
	add(text(r))
}

// levelBits is how many bits are kept of the hash of the i-th prefix.
func levelBits(i int) int {
	if i == 0 {
		return firstBits
	}
	return laterBits
}

// prefixes makes of the kept bits what an Entry has.
func (b *beginnings) prefixes(prompt int) []Prefix {
	if b.n == 0 {
		return nil
	}
	all := make([]Prefix, b.n)
	hash := uint64(0)
	for i := range all {
		hash = (hash ^ b.bits[i] ^ uint64(i)<<firstBits) * 0x9e3779b97f4a7c15
		hash ^= hash >> 32
		size := float64(int(block) << i)
		all[i] = Prefix{Hash: hash, Tokens: int(float64(prompt) * size / max(float64(b.size), size))}
	}
	return all
}
