// SPDX-License-Identifier: Apache-2.0

package kvindex

import "slices"

// content is what a source holds, as its events tell.
type content struct {
	columns  []*column
	blocks   int    // entries of all columns
	ignored  uint64 // groups of a kind that tells of no prefix, by their number
	unusable string // why an event about device memory could not be used; "" if all could
	trtllm   trtllm

	tokens []uint32 // memory for the tokens of one event
	odd    int      // the first of them that is no number of 32 bits, as of TensorRT-LLM's images
}

const (
	columnsMost = 32      // of one rank: a few media, times a few groups
	blockMost   = 1 << 16 // tokens
	groupsMost  = 64
)

// The reasons why an event cannot be used.
const (
	unusableLengths  = "an event's tokens do not fit its blocks"
	unusableParent   = "a block's parent is not known"
	unusableTokens   = "a block came without its tokens"
	unusableHash     = "an event's hashes could not be read, or mean two blocks"
	unusableRemoved  = "a block was removed that is not known"
	unusableKind     = "a group's kind is not known"
	unusableTooMany  = "there are more blocks, media or groups than may be"
	unusableExtraKey = "an event's extra keys do not fit its blocks"
)

// reset drops all that is known of the source.
func (s *stream) reset() {
	s.empty()
	if len(s.columns) > 0 {
		s.model.drop(s)
	}
	s.columns, s.ignored, s.trtllm = nil, 0, trtllm{}
}

// empty takes all blocks out of the columns.
func (s *stream) empty() {
	for _, c := range s.columns {
		for i, key := range c.refs.keys {
			if key != 0 && c.refs.counts[i] > 0 {
				c.page.clear(key, c.bit)
			}
		}
		c.refs, c.doubles = refs{}, nil
		c.told()
	}
	s.blocks, s.unusable = 0, ""
}

func (s *stream) spoil(reason string) {
	if s.unusable == "" {
		s.unusable = reason
	}
}

// apply applies the events of a batch.
func (s *stream) apply(b *batch) error {
	if b.json != nil {
		s.applyTRTLLM(b.json)
		return nil
	}
	var e event
	for range b.n {
		e.next(&b.events)
		if b.events.bad {
			return errPayload
		}
		switch e.kind {
		case eventStored:
			s.stored(&e)
		case eventRemoved:
			s.removed(&e)
		case eventCleared: // all tiers and groups; what was missing before does not matter now
			s.empty()
			s.whole, s.short = true, false
		}
	}
	return nil
}

// where tells which columns an event is about. Media whose blocks lie elsewhere than in device memory may miss some
// without harm to the state, which is about device memory.
type where struct {
	medium []byte
	tier   Tier
	group  int
}

// where reads an event's medium and group; ok is false if its group is of no use.
func (s *stream) where(e *event) (w where, ok bool) {
	w = where{medium: e.text(fieldMedium), group: -1}
	if len(w.medium) == 0 {
		w.medium = mediumDevice
	}
	w.tier = tierOf(w.medium)
	if e.fields[fieldGroup] != nil {
		r := reader{b: e.fields[fieldGroup]}
		if w.group, ok = r.int(); !ok || w.group >= groupsMost {
			s.lacking(w, unusableTooMany)
			return w, false
		}
		if spec := e.text(fieldSpec); !full(spec) {
			if string(spec) == "unknown" {
				s.lacking(w, unusableKind)
			}
			s.ignored |= 1 << w.group
		}
		return w, s.ignored>>w.group&1 == 0
	}
	return w, full(e.text(fieldSpec))
}

// mediumDevice is the medium of events that name none.
var mediumDevice = []byte("GPU")

// lacking notes that an event could not be used.
func (s *stream) lacking(w where, reason string) {
	if w.tier == TierDevice {
		s.spoil(reason)
	}
}

// stored applies a BlockStored.
func (s *stream) stored(e *event) {
	w, ok := s.where(e)
	if !ok {
		return
	}
	hashes, n := e.list(fieldHashes)
	if n == 0 {
		return
	}
	tokens, m := e.list(fieldTokens)
	size := reader{b: e.fields[fieldBlockSize]}
	block, _ := size.int()
	if m <= 0 {
		s.storedElsewhere(w, block, hashes, n)
		return
	}
	if n < 0 || block <= 0 || block > blockMost || n > m/block || n*block != m {
		s.lacking(w, unusableLengths)
		return
	}
	look, ok := s.readTokens(tokens, m)
	if !ok {
		s.lacking(w, unusableTokens)
		return
	}
	ahead := lookahead{after: look}
	if list, lists := e.list(fieldLookahead); lists >= 0 {
		ahead.list = list
		if ahead.n, ok = sameLengths(list, lists); !ok || lists != n {
			s.lacking(w, unusableTokens)
			return
		}
	} else if look {
		ahead.n = 1
	}
	s.storedBlocks(e, w, hashes, n, class{block: block, lookahead: ahead.n}, ahead)
}

// lookahead are the tokens after each block that belong to its hash.
type lookahead struct {
	n     int
	list  reader // vLLM: a list for each block
	after bool   // SGLang's pairs: the token that follows the block
}

// storedBlocks adds the blocks of an event whose tokens have been read.
func (s *stream) storedBlocks(e *event, w where, hashes reader, n int, cl class, ahead lookahead) {
	h := s.index.hash
	before, ok := s.parent(e, w, cl)
	if !ok {
		s.lacking(w, unusableParent)
		return
	}
	extras, m := e.list(fieldExtra)
	if m >= 0 && m != n {
		s.lacking(w, unusableExtraKey)
		return
	}
	c := s.column(w, cl)
	if c == nil {
		s.lacking(w, unusableTooMany)
		return
	}
	again, key, first := string(e.text(fieldOrigin)) == "REUSED", before.key, e.fields[fieldParent] == nil
	if first {
		before = link{}
	}
	for i := range n {
		key = h.run(key, s.tokens[i*cl.block:(i+1)*cl.block])
		if ahead.after {
			key = h.run(key, s.tokens[(i+1)*cl.block:(i+1)*cl.block+1])
		} else if cl.lookahead > 0 {
			key = s.runList(key, &ahead.list)
		}
		if (i+1)*cl.block > s.odd {
			key = h.text(key, textOther, nil) // so that no query meets it
		}
		if m >= 0 {
			key = h.extras(key, &extras, e.text(fieldLoRA))
		}
		if i == 0 && first {
			if salt := e.text(fieldSalt); len(salt) > 0 {
				key = h.text(key, textExtra, salt)
			}
		}
		key = max(key, 1)
		hash, ok := h.hash(&hashes)
		if !ok {
			s.lacking(w, unusableHash)
			return
		}
		name := h.name(hash)
		s.add(w, c, name, key, before, again)
		before = link{name, key}
	}
}

// parent returns the block before an event's first one. Where that is a prompt's first it has a key and no name.
func (s *stream) parent(e *event, w where, cl class) (before link, ok bool) {
	h := s.index.hash
	if e.fields[fieldParent] == nil {
		if lora := e.text(fieldLoRA); len(lora) > 0 || e.fields[fieldLoRAID] == nil {
			return link{key: h.root(lora)}, true
		}
		return link{key: h.text(h.root(nil), textOther, e.fields[fieldLoRAID])}, true // an adapter without a name
	}
	r := reader{b: e.fields[fieldParent]}
	hash, ok := h.hash(&r)
	if !ok {
		return link{}, false
	}
	name := h.name(hash)
	key := s.known(name, w, cl)
	return link{name, key}, key != 0
}

// known returns the key of a block: from the column that an event is about, or from others of the same class, since a
// parent may have gone to another medium.
func (s *stream) known(name uint64, w where, cl class) uint64 {
	for _, own := range [...]bool{true, false} {
		for _, c := range s.columns {
			if c.page.class == cl && own == (c.group == w.group && c.medium == string(w.medium)) {
				if key := c.refs.key(name); key != 0 {
					return key
				}
			}
		}
	}
	return 0
}

// storedElsewhere adds blocks that come without tokens: vLLM tells so of what it has copied from device memory to
// another medium, under the same hashes.
func (s *stream) storedElsewhere(w where, block int, hashes reader, n int) {
	for range n {
		hash, ok := s.index.hash.hash(&hashes)
		if !ok {
			break
		}
		name, found := s.index.hash.name(hash), false
		for _, from := range s.columns {
			if block > 0 && block != from.page.class.block {
				continue
			}
			if key := from.refs.key(name); key != 0 {
				found = s.copyFrom(from, w, name, key)
				break
			}
		}
		if !found {
			s.lacking(w, unusableTokens)
		}
	}
}

// copyFrom adds a block of another column; ok is false if there are too many columns.
func (s *stream) copyFrom(from *column, w where, name, key uint64) (ok bool) {
	c := s.column(w, from.page.class)
	if c == nil {
		return false
	}
	before, ok := from.refs.before(name)
	s.add(w, c, name, key, before, false)
	c.refs.blurred = c.refs.blurred || !ok
	c.told()
	return true
}

// add counts a block in a column.
func (s *stream) add(w where, c *column, name, key uint64, before link, again bool) {
	if s.blocks >= s.index.blocks && !c.refs.holds(name) {
		s.lacking(w, unusableTooMany)
		return
	}
	s.blocks -= c.refs.used
	fresh, ok := c.refs.add(name, key, before, again)
	s.blocks += c.refs.used
	if !ok {
		s.lacking(w, unusableHash)
	}
	if !fresh {
		return
	}
	c.told()
	if c.page.set(key, c.bit) {
		if c.doubles == nil {
			c.doubles = map[uint64]int{}
		}
		c.doubles[key]++
	}
}

// column returns the column for an event's blocks, nil if there are too many.
func (s *stream) column(w where, cl class) *column {
	for _, c := range s.columns {
		if c.page.class == cl && c.group == w.group && c.medium == string(w.medium) {
			return c
		}
	}
	if len(s.columns) == columnsMost {
		return nil
	}
	c := s.model.add(s, cl, string(w.medium), w.group)
	s.columns = append(s.columns, c)
	return c
}

// removed applies a BlockRemoved.
func (s *stream) removed(e *event) {
	w, ok := s.where(e)
	if !ok {
		return
	}
	hashes, n := e.list(fieldHashes)
	counts, m := e.list(fieldRemaining)
	for range n {
		hash, ok := s.index.hash.hash(&hashes)
		if !ok {
			s.lacking(w, unusableHash)
			return
		}
		remaining := -1
		if m == n {
			if left, ok := counts.int(); ok {
				remaining = left
			}
		}
		if !s.drop(w, s.index.hash.name(hash), remaining) {
			s.lacking(w, unusableRemoved)
		}
	}
	if n < 0 {
		s.lacking(w, unusableHash)
	}
}

// drop counts a block once less, and reports whether it was known.
func (s *stream) drop(w where, name uint64, remaining int) bool {
	for _, c := range s.columns {
		if c.group != w.group || c.medium != string(w.medium) {
			continue
		}
		s.blocks -= c.refs.used
		key, gone, known := c.refs.drop(name, remaining)
		s.blocks += c.refs.used
		if !known {
			continue
		}
		if gone {
			c.told()
			if more := c.doubles[key]; more > 1 {
				c.doubles[key] = more - 1
			} else if more == 1 {
				delete(c.doubles, key)
			} else {
				c.page.clear(key, c.bit)
			}
		}
		return true
	}
	return false
}

// readTokens reads an event's n tokens into s.tokens. Of pairs (an EAGLE cache of SGLang) it takes the first of each,
// and after says that the second of the last one follows.
func (s *stream) readTokens(r reader, n int) (after, ok bool) {
	s.tokens, s.odd = slices.Grow(s.tokens[:0], n+1)[:n], n
	var second uint64
	for i := range s.tokens {
		before := r.b
		v := r.head()
		switch {
		case v.kind == kindInt && !after && v.num>>32 == 0:
			s.tokens[i] = uint32(v.num)
		case v.kind == kindArray && v.n == 2 && (after || i == 0):
			a, b := r.head(), r.head()
			if a.kind != kindInt || b.kind != kindInt || (a.num|b.num)>>32 != 0 || after && a.num != second {
				return false, false
			}
			s.tokens[i], second, after = uint32(a.num), b.num, true
		case after || r.bad:
			return false, false
		default:
			r.finish(v)
			s.odd = min(s.odd, i)
			s.tokens[i] = uint32(s.index.hash.text(0, textOther, before[:len(before)-len(r.b)]))
		}
	}
	if after {
		s.tokens = append(s.tokens, uint32(second))
	}
	return after, !r.bad
}

// sameLengths returns the length of the lists in a list, if they all have the same.
func sameLengths(r reader, n int) (length int, ok bool) {
	for i := range n {
		v := r.head()
		if v.kind != kindArray || v.n > blockMost || i > 0 && v.n != length {
			return 0, false
		}
		length = v.n
		r.finish(v)
	}
	return length, !r.bad
}

// runList goes on with the next list of tokens.
func (s *stream) runList(key uint64, r *reader) uint64 {
	begin := len(s.tokens)
	for range r.head().n {
		n, ok := r.int()
		if !ok {
			key = s.index.hash.text(key, textOther, nil) // so that no query meets it
		}
		s.tokens = append(s.tokens, uint32(n))
	}
	key = s.index.hash.run(key, s.tokens[begin:])
	s.tokens = s.tokens[:begin]
	return key
}

// extras goes on with the next block's extra keys: a list of the adapter's name, [identifier, offset] of each image and
// the like, the salt, and a digest of embeddings. The adapter is in the root already. What has another form is hashed
// as it comes, and no query meets it.
func (h *hasher) extras(key uint64, r *reader, lora []byte) uint64 {
	before := r.b
	list := r.head()
	if list.kind != kindArray {
		r.finish(list)
		if list.kind != kindNil && !r.bad {
			key = h.text(key, textOther, before[:len(before)-len(r.b)])
		}
		return key
	}
	for i := range list.n {
		raw := reader{b: r.raw()}
		all := raw.b
		v := raw.head()
		switch {
		case v.kind == kindText:
			if b := raw.content(v); i > 0 || len(lora) == 0 || string(b) != string(lora) {
				key = h.text(key, textExtra, b)
			}
			continue
		case v.kind == kindArray && v.n == 2:
			id, ok := raw.text()
			if offset := raw.head(); ok && offset.kind == kindInt {
				key = h.media(key, id, int64(offset.num))
				continue
			}
		}
		key = h.text(key, textOther, all)
	}
	return key
}
