// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// page holds the blocks of up to 64 columns: for each key the set of columns that hold the block, as bits. So one
// look-up answers for all of them. A column is what one rank of an engine holds in one medium.
//
// Readers take no lock: a slot's key never changes once it is set, and when a shard needs another array, it gets a
// whole one. Writers of a shard take turns. The arrays have no pointers, so the collector does not look into them.
type page struct {
	class  class
	shards [shardCount]shard
	open   atomic.Uint64 // columns that may hold a block without the block before it
	used   uint64        // columns that are in use; guarded by the model's lock
}

// class is what blocks must have in common to be looked up by one key.
type class struct {
	block     int // tokens
	lookahead int // tokens after the block that belong to its key (EAGLE); 0 nearly always
}

const shardCount = 256

type shard struct {
	mu    sync.Mutex
	slots atomic.Pointer[[]slot]
	taken int // slots with a key
	live  int // slots with a column
}

type slot struct {
	key     atomic.Uint64 // 0: free
	columns atomic.Uint64
}

// The share of slots that have a key is at most 4/5, where a search takes 3 steps, and a new array begins at 2/3.
const shardLeast = 8

func home(key uint64, slots int) int {
	hi, _ := bits.Mul64(key<<8, uint64(slots))
	return int(hi)
}

func (p *page) shard(key uint64) *shard { return &p.shards[key>>56] }

// find returns the slot of a key, or the free one where it would be.
func find(slots []slot, key uint64) *slot {
	for i := home(key, len(slots)); ; {
		s := &slots[i]
		if k := s.key.Load(); k == key || k == 0 {
			return s
		}
		if i++; i == len(slots) {
			i = 0
		}
	}
}

// columns returns the columns that hold a block.
func (p *page) columns(key uint64) uint64 {
	slots := p.shard(key).slots.Load()
	if slots == nil {
		return 0
	}
	if s := find(*slots, key); s.key.Load() == key {
		return s.columns.Load()
	}
	return 0
}

// touch reads the place where a key would be, so that the processor fetches it while it does other things.
func (p *page) touch(key uint64) uint64 {
	slots := p.shard(key).slots.Load()
	if slots == nil {
		return 0
	}
	return (*slots)[home(key, len(*slots))].key.Load()
}

// set adds a column to a block, and reports whether it was there already.
func (p *page) set(key, column uint64) (was bool) {
	s := p.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	slots := s.slots.Load()
	if slots == nil || (s.taken+1)*5 > len(*slots)*4 {
		slots = s.grow(slots)
	}
	at := find(*slots, key)
	columns := at.columns.Load()
	if columns == 0 {
		s.live++
	}
	at.columns.Store(columns | column)
	if at.key.Load() == 0 { // after its columns, so that a reader who sees the key sees them
		at.key.Store(key)
		s.taken++
	}
	return columns&column != 0
}

// clear takes a column from a block. The key keeps its slot until the next array, since a reader may be looking at it.
func (p *page) clear(key, column uint64) {
	s := p.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	slots := s.slots.Load()
	if slots == nil {
		return
	}
	at := find(*slots, key)
	if at.key.Load() != key {
		return
	}
	columns := at.columns.Load()
	if columns&column == 0 {
		return
	}
	at.columns.Store(columns &^ column)
	if columns == column {
		if s.live--; s.live*4 < len(*slots) && len(*slots) > 4*shardLeast {
			s.grow(slots)
		}
	}
}

// grow makes an array of the size for the blocks that some column holds, and one more.
func (s *shard) grow(old *[]slot) *[]slot {
	slots := make([]slot, max((s.live+1)*3/2, shardLeast))
	s.taken = 0
	if old != nil {
		for i := range *old {
			from := &(*old)[i]
			if columns := from.columns.Load(); columns != 0 {
				to := find(slots, from.key.Load())
				to.columns.Store(columns)
				to.key.Store(from.key.Load())
				s.taken++
			}
		}
	}
	s.slots.Store(&slots)
	return &slots
}
