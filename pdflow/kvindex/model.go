// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"cmp"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
)

// model is what the engines of one model share: the pages in which their columns are. Match reads its view, which is
// made anew when a column comes or goes.
type model struct {
	mu      sync.Mutex
	pages   []*page
	columns map[*stream][]*column
	streams int // guarded by the index's lock
	view    atomic.Pointer[view]
}

// column is what one rank of an engine holds in one medium, of one of its KV cache groups. Its stream's lock guards
// what changes.
type column struct {
	page   *page
	bit    uint64
	medium string
	tier   Tier
	group  int // -1: the engine does not tell

	refs refs
	// Keys under which the engine has more than one block: their hashes differ by what events do not tell, as a LoRA's
	// path. A key's value counts those after the first.
	doubles map[uint64]int
}

// told tells the page whether the column is closed.
func (c *column) told() {
	switch open := c.page.open.Load()&c.bit != 0; {
	case open && c.refs.closed():
		c.page.open.And(^c.bit)
	case !open && !c.refs.closed():
		c.page.open.Or(c.bit)
	}
}

// view is what Match reads.
type view struct {
	classes []viewClass
	pages   []*page // of the first class, then of the second …
	used    []uint64
	streams []viewStream
}

type viewClass struct {
	class
	from, to int // its pages
}

type viewStream struct {
	*stream
	columns []viewColumn // those of a medium together, and in it those of a group
}

type viewColumn struct {
	*column
	at int // its place in a scratch's lengths
}

// add makes a column for a stream.
func (m *model) add(s *stream, cl class, medium string, group int) *column {
	m.mu.Lock()
	defer m.mu.Unlock()
	at := slices.IndexFunc(m.pages, func(p *page) bool { return p.class == cl && p.used != ^uint64(0) })
	if at < 0 {
		at = len(m.pages)
		m.pages = append(m.pages, &page{class: cl})
	}
	p := m.pages[at]
	bit := ^p.used & -^p.used // the lowest that is free
	p.used |= bit
	c := &column{page: p, bit: bit, medium: medium, tier: tierOf([]byte(medium)), group: group}
	m.columns[s] = append(m.columns[s], c)
	m.look()
	return c
}

// drop takes the columns of a stream away. They are empty. It reports whether the model has any left.
func (m *model) drop(s *stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.columns[s] {
		c.page.used &^= c.bit
	}
	delete(m.columns, s)
	m.pages = slices.DeleteFunc(m.pages, func(p *page) bool { return p.used == 0 })
	m.look()
}

// look makes the view anew.
func (m *model) look() {
	v := &view{pages: slices.Clone(m.pages)}
	slices.SortStableFunc(v.pages, func(a, b *page) int {
		return cmp.Or(cmp.Compare(a.class.block, b.class.block), cmp.Compare(a.class.lookahead, b.class.lookahead))
	})
	for i, p := range v.pages {
		if n := len(v.classes); n == 0 || v.classes[n-1].class != p.class {
			v.classes = append(v.classes, viewClass{class: p.class, from: i})
		}
		v.classes[len(v.classes)-1].to = i + 1
		v.used = append(v.used, p.used)
	}
	for s, columns := range m.columns {
		vs := viewStream{stream: s}
		for _, c := range columns {
			at := slices.Index(v.pages, c.page)*64 + bits.TrailingZeros64(c.bit)
			vs.columns = append(vs.columns, viewColumn{column: c, at: at})
		}
		slices.SortStableFunc(vs.columns, func(a, b viewColumn) int {
			return cmp.Or(cmp.Compare(a.tier, b.tier), cmp.Compare(a.medium, b.medium), cmp.Compare(a.group, b.group))
		})
		v.streams = append(v.streams, vs)
	}
	slices.SortFunc(v.streams, func(a, b viewStream) int {
		return cmp.Or(cmp.Compare(a.source.Engine, b.source.Engine), cmp.Compare(a.source.Rank, b.source.Rank))
	})
	m.view.Store(v)
}
