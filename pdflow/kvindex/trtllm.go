// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"math"
	"slices"
	"strconv"

	"github.com/tidwall/gjson"
)

// TensorRT-LLM keeps its events until POST /kv_cache_events takes them, as a list of JSON objects (main of 2026-08,
// between 1.3.0rc21 and rc24: tensorrt_llm/_utils.py, KVCacheEventSerializer; batch_manager/kvCacheEventManager.cpp;
// runtime/kv_cache_manager_v2/_event_manager.py). Each event is a batch here, and its event_id the batch's number: each
// attention-DP rank counts its own from 0, over all attention windows.
//
// What differs from vLLM's events:
//   - The first events, created, name the attention windows. Only the largest counts. V2 may have several layer groups
//     with it: they are groups as vLLM's.
//   - No event tells how many tokens a block has, and a prompt's last block is told though it is not full. A block that
//     another follows is full, so that tells it.
//   - A hash is in the engine's tree once, so it is not counted. A block whose hash is not known may be removed or
//     moved: it was not full.
//   - What the engine frees with the blocks that follow it may be told of the first block alone.

// trtllm is what is known of an engine of this kind besides its blocks.
type trtllm struct {
	window int  // the largest attention window
	block  int  // tokens of its blocks; 0: not known
	guess  bool // block is that of the largest block yet, which may not be full
}

const (
	unusableAlike  = "blocks differ by what events do not tell, as by an adapter"
	unusableBefore = "a block was removed before those that follow it"
)

// applyTRTLLM applies an event.
func (s *stream) applyTRTLLM(payload []byte) {
	e := members(gjson.ParseBytes(payload), "data", "window_size", "layer_group_id")
	w := where{medium: mediumDevice, group: -1}
	window, _ := smallInt(e[1])
	if window > s.trtllm.window {
		s.dropTRTLLM()
		s.trtllm.window = window
	}
	if window < s.trtllm.window {
		return
	}
	if group := e[2]; present(group) {
		var ok bool
		if w.group, ok = smallInt(group); !ok || w.group >= groupsMost {
			s.spoil(unusableTooMany)
			return
		}
	}
	d := members(e[0], "type", "parent_hash", "blocks", "block_hashes", "block_hash", "cache_level")
	switch d[0].Str {
	case "stored":
		s.storedTRTLLM(d[1], d[2], w)
	case "removed":
		s.removedTRTLLM(d[3], w)
	case "updated":
		if level := members(d[5], "new_value")[0]; level.Exists() { // else another thing was
			s.movedTRTLLM(d[4], level, w)
		}
	}
}

// trtBlocksMost bounds the blocks of a stored event, which take 80 bytes each while it is read, however short they are.
const trtBlocksMost = 1 << 17

func (s *stream) storedTRTLLM(parent, list gjson.Result, w where) {
	var blocks []gjson.Result
	list.ForEach(func(_, block gjson.Result) bool {
		blocks = append(blocks, block)
		return len(blocks) <= trtBlocksMost
	})
	switch n := len(blocks); {
	case n == 0:
		return
	case n > trtBlocksMost:
		s.spoil(unusableTooMany)
		return
	}
	h := s.index.hash
	if !s.learnBlock(blocks, present(parent)) {
		s.spoil(unusableLengths)
		return
	}
	cl, before, key := class{block: s.trtllm.block}, link{}, h.root(nil)
	if present(parent) {
		if hash, ok := h.hashTRTLLM(parent); ok {
			before.name = h.name(hash)
			before.key = s.known(before.name, w, cl)
		}
		if key = before.key; key == 0 {
			s.spoil(unusableParent)
			return
		}
	}
	for i, block := range blocks {
		b := members(block, "block_hash", "tokens", "cache_level", "mm_keys", "cache_salt")
		hash, ok := h.hashTRTLLM(b[0])
		if !ok {
			s.spoil(unusableHash)
			return
		}
		odd := s.tokensTRTLLM(b[1])
		if n := len(s.tokens); n > cl.block || n < cl.block && i+1 < len(blocks) {
			s.spoil(unusableLengths)
			return
		} else if n < cl.block {
			return // not full
		}
		if key = h.run(key, s.tokens); odd {
			key = h.text(key, textOther, []byte(b[1].Raw)) // so that no query meets it
		}
		if media := b[3]; media.Get("0").Exists() {
			key = h.text(key, textOther, []byte(media.Raw)) // its identifiers are those of no client
		}
		if salt := b[4]; i == 0 && !present(parent) && present(salt) && salt.String() != "" {
			key = h.text(key, textExtra, []byte(salt.String()))
		}
		key = max(key, 1)
		w := w.at(b[2])
		c := s.column(w, cl)
		if c == nil {
			s.lacking(w, unusableTooMany)
			return
		}
		name := h.name(hash)
		s.add(w, c, name, key, before, true)
		if len(c.doubles) > 0 {
			s.lacking(w, unusableAlike)
		}
		before = link{name, key}
	}
}

// learnBlock learns of a stored event how many tokens a block has; ok is false if that cannot be.
func (s *stream) learnBlock(blocks []gjson.Result, follows bool) (ok bool) {
	t := &s.trtllm
	if t.block > 0 && !t.guess {
		return true
	}
	n := int(blocks[0].Get("tokens.#").Int())
	sure := len(blocks) > 1 // the first one is full
	if follows {            // and so is the one that it follows, which is known if anything is
		n, sure = max(n, t.block), t.block > 0
	}
	if n < 1 || n > blockMost || sure && n < t.block {
		return false
	}
	if n > t.block {
		s.dropTRTLLM() // none of those before was full
		t.block, t.guess = n, true
	}
	t.guess = t.guess && !sure
	return true
}

// dropTRTLLM drops all blocks, and nothing else of what is known.
func (s *stream) dropTRTLLM() {
	known, unusable := s.trtllm, s.unusable
	s.reset()
	s.trtllm, s.unusable = known, unusable
}

// tokensTRTLLM reads a block's tokens into s.tokens. odd says that not all are plain token ids: V2 has digests of
// images as text.
func (s *stream) tokensTRTLLM(list gjson.Result) (odd bool) {
	s.tokens = s.tokens[:0]
	list.ForEach(func(_, token gjson.Result) bool {
		t := members(token, "token_id", "token_extra_id")
		n, ok := smallInt(t[0])
		odd = odd || !ok || present(t[1]) && t[1].Raw != "0"
		s.tokens = append(s.tokens, uint32(n))
		return len(s.tokens) <= blockMost
	})
	return odd
}

// removedTRTLLM drops blocks, wherever they are.
func (s *stream) removedTRTLLM(hashes gjson.Result, w where) {
	var names []uint64
	hashes.ForEach(func(_, v gjson.Result) bool {
		if hash, ok := s.index.hash.hashTRTLLM(v); ok {
			names = append(names, s.index.hash.name(hash))
		} else {
			s.spoil(unusableHash)
		}
		return true
	})
	for _, name := range names {
		if c := s.holder(w.group, name); c != nil {
			s.drop(where{medium: []byte(c.medium), group: w.group}, name, 0)
		}
	}
	for _, name := range names { // what follows one of them may have been freed with it
		for _, c := range s.columns {
			if c.group == w.group && c.refs.key(name) != 0 {
				s.spoil(unusableBefore)
			}
		}
	}
}

// movedTRTLLM moves a block to another level.
func (s *stream) movedTRTLLM(v, level gjson.Result, w where) {
	hash, ok := s.index.hash.hashTRTLLM(v)
	if !ok {
		s.spoil(unusableHash)
		return
	}
	name, w := s.index.hash.name(hash), w.at(level)
	from := s.holder(w.group, name)
	if from == nil || from.medium == string(w.medium) {
		return
	}
	if !s.copyFrom(from, w, name, from.refs.key(name)) {
		s.spoil(unusableTooMany)
	}
	s.drop(where{medium: []byte(from.medium), group: w.group}, name, 0)
}

// holder returns the column of a group that holds a block, nil if none does.
func (s *stream) holder(group int, name uint64) *column {
	for _, c := range s.columns {
		if c.group == group && c.refs.holds(name) {
			return c
		}
	}
	return nil
}

// at returns the place of a cache level: device memory, the host's, or a disk.
func (w where) at(level gjson.Result) where {
	switch n, _ := smallInt(level); n {
	case 0:
		w.medium = mediumDevice
	case 1:
		w.medium = []byte("CPU")
	default:
		w.medium = []byte("DISK")
	}
	w.tier = tierOf(w.medium)
	return w
}

// hashTRTLLM reads a hash: a whole number of 64 bits, which a float64 cannot hold, or V2's SHA-256 as text.
func (h *hasher) hashTRTLLM(v gjson.Result) (hash uint64, ok bool) {
	if v.Type == gjson.String {
		return h.text(0, textHash, []byte(v.Str)), true
	}
	if n, err := strconv.ParseUint(v.Raw, 10, 64); err == nil {
		return n, true
	}
	n, err := strconv.ParseInt(v.Raw, 10, 64)
	return uint64(n), err == nil
}

// smallInt reads a whole number of at most 32 bits.
func smallInt(v gjson.Result) (n int, ok bool) {
	u, err := strconv.ParseUint(v.Raw, 10, 32)
	if err != nil || u > math.MaxInt32 {
		return 0, false
	}
	return int(u), true
}

// members returns an object's members by their names, in one pass: an event is long.
func members(object gjson.Result, names ...string) (found [6]gjson.Result) {
	object.ForEach(func(key, value gjson.Result) bool {
		if i := slices.Index(names, key.Str); i >= 0 {
			found[i] = value
		}
		return true
	})
	return found
}

func present(v gjson.Result) bool { return v.Exists() && v.Type != gjson.Null }
