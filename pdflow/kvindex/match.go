// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"math"
	"math/bits"
)

// scratch is the memory of one Match.
type scratch struct {
	alive   []uint64 // for each page, the columns that hold each block so far
	lengths []int32  // for each column, the blocks that it holds from the begin
	keys    [batchBlocks]uint64
	sink    uint64
}

// batchBlocks is how many blocks are hashed before they are looked up, so that their places in memory are fetched
// beside each other.
const batchBlocks = 64

// Match appends to dst what engines hold of a prompt's beginning: one Hit for each rank that holds at least a block, in
// the order of engines and ranks. At most len(q.Tokens)-1 tokens count, in whole blocks, because an engine computes the
// last token in any case. Match waits for no Apply, and allocates nothing if dst has room.
func (x *Index) Match(q *Query, dst []Hit) []Hit {
	m := (*x.models.Load())[q.Model]
	if m == nil {
		return dst
	}
	sc, _ := x.scratches.Get().(*scratch)
	if sc == nil {
		sc = &scratch{}
	}
	defer x.scratches.Put(sc)
	begin := len(dst)
	for range 3 { // columns have come or gone meanwhile, and one may have had two owners: seldom
		v := m.view.Load()
		sc.find(x.hash, v, q)
		dst = sc.hits(v, dst[:begin])
		if m.view.Load() == v {
			break
		}
	}
	return dst
}

func (sc *scratch) find(h *hasher, v *view, q *Query) {
	if need := len(v.pages); cap(sc.alive) < need {
		sc.alive, sc.lengths = make([]uint64, need), make([]int32, 64*need)
	}
	sc.alive, sc.lengths = sc.alive[:len(v.pages)], sc.lengths[:64*len(v.pages)]
	copy(sc.alive, v.used)
	root := h.root([]byte(q.LoRA))
	for _, c := range v.classes {
		sc.class(h, c, v.pages[c.from:c.to], q, root)
	}
}

// class looks the prompt up in the pages of one class.
func (sc *scratch) class(h *hasher, c viewClass, pages []*page, q *Query, key uint64) {
	alive, lengths := sc.alive[c.from:c.to], sc.lengths[64*c.from:64*c.to]
	blocks := min(len(q.Tokens)-1, len(q.Tokens)-c.lookahead) / c.block
	media := q.Media
	done := 0
	for done < blocks {
		keys := sc.keys[:min(batchBlocks, blocks-done)]
		for i := range keys {
			begin := (done + i) * c.block
			end := begin + c.block
			key = h.run(key, q.Tokens[begin:end])
			if c.lookahead > 0 {
				key = h.run(key, q.Tokens[end:end+c.lookahead])
			}
			for len(media) > 0 && media[0].Offset+media[0].Length <= begin {
				media = media[1:]
			}
			for _, item := range media {
				if item.Offset >= end {
					break
				}
				key = h.media(key, []byte(item.Key), int64(item.Offset-begin))
			}
			if begin == 0 && q.Salt != "" {
				key = h.text(key, textExtra, []byte(q.Salt))
			}
			key = max(key, 1)
			keys[i] = key
		}
		some := false
		for i, p := range pages {
			if alive[i] != 0 {
				alive[i] = sc.batch(p, keys, done, alive[i], (*[64]int32)(lengths[64*i:]))
				some = some || alive[i] != 0
			}
		}
		if done += len(keys); !some {
			break
		}
	}
	for i := range pages {
		for left := alive[i]; left != 0; left &= left - 1 {
			lengths[64*i+bits.TrailingZeros64(left)] = int32(max(blocks, 0))
		}
	}
}

// batch looks keys up that follow each other, and writes down where a column's prefix ends. It returns the columns
// whose prefix goes on.
func (sc *scratch) batch(p *page, keys []uint64, done int, alive uint64, lengths *[64]int32) uint64 {
	if alive&p.open.Load() == 0 {
		left := alive & p.columns(keys[len(keys)-1])
		p.halve(keys, done, alive&^left, lengths)
		return left
	}
	for _, key := range keys {
		sc.sink ^= p.touch(key)
	}
	return p.walk(keys, done, alive, lengths)
}

// halve looks for the first of the keys that a column does not have, by halves, for columns that have no block without
// the block before it, and not the last of the keys.
func (p *page) halve(keys []uint64, done int, gone uint64, lengths *[64]int32) {
	for gone != 0 {
		if len(keys) == 1 {
			for ; gone != 0; gone &= gone - 1 {
				lengths[bits.TrailingZeros64(gone)] = int32(done)
			}
			return
		}
		middle := len(keys) / 2
		later := gone & p.columns(keys[middle-1])
		p.halve(keys[:middle], done, gone&^later, lengths)
		keys, done, gone = keys[middle:], done+middle, later
	}
}

// walk looks keys up one after the other, and writes down where a column's prefix ends. It returns the columns whose
// prefix goes on.
func (p *page) walk(keys []uint64, done int, alive uint64, lengths *[64]int32) uint64 {
	for i, key := range keys {
		held := p.columns(key)
		for gone := alive &^ held; gone != 0; gone &= gone - 1 {
			lengths[bits.TrailingZeros64(gone)] = int32(done + i)
		}
		if alive &= held; alive == 0 {
			break
		}
	}
	return alive
}

// hits puts together what the columns of each rank hold.
func (sc *scratch) hits(v *view, dst []Hit) []Hit {
	for i := range v.streams {
		s := &v.streams[i]
		hit := Hit{Engine: s.source.Engine, Rank: s.source.Rank}
		for from := 0; from < len(s.columns); {
			medium, to := sc.medium(s.columns, from)
			c := s.columns[from]
			if c.tier == TierDevice {
				hit.Device = max(hit.Device, medium)
			}
			if medium > hit.Tokens {
				hit.Tokens, hit.Tier = medium, c.tier
			}
			from = to
		}
		if hit.Tokens > 0 {
			hit.Exact = s.exact.Load()
			dst = append(dst, hit)
		}
	}
	return dst
}

// medium returns the tokens that all groups of a medium hold, and where the next medium's columns begin. A group that
// has blocks of several sizes has the longest of their prefixes.
func (sc *scratch) medium(columns []viewColumn, from int) (tokens, to int) {
	tokens, to = math.MaxInt, from
	for to < len(columns) && columns[to].medium == columns[from].medium {
		longest, group := 0, columns[to].group
		for ; to < len(columns) && columns[to].medium == columns[from].medium && columns[to].group == group; to++ {
			longest = max(longest, int(sc.lengths[columns[to].at])*columns[to].page.class.block)
		}
		tokens = min(tokens, longest)
	}
	return tokens, to
}
