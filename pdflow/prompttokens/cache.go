// SPDX-License-Identifier: Apache-2.0

package prompttokens

import "container/list"

// key is a hash of a request. No prompt is kept.
type key [32]byte

// tokens is what an engine has answered.
type tokens struct {
	ids   []uint32
	exact bool
}

// entryBytes is about what an entry takes besides its tokens.
const entryBytes = 256

func (t tokens) bytes() int64 { return entryBytes + 4*int64(cap(t.ids)) }

type entry struct {
	key    key
	tokens tokens
}

// cache keeps the tokens of the requests that were asked for last, within a limit of bytes. It has no lock.
type cache struct {
	limit, used int64
	byKey       map[key]*list.Element
	order       list.List // of *entry, the last used one first
}

func (c *cache) get(k key) (tokens, bool) {
	e := c.byKey[k]
	if e == nil {
		return tokens{}, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*entry).tokens, true //nolint:errcheck,forcetypeassert // the list holds nothing else
}

func (c *cache) put(k key, t tokens) {
	if t.bytes() > c.limit || c.byKey[k] != nil {
		return
	}
	if c.byKey == nil {
		c.byKey = map[key]*list.Element{}
	}
	c.byKey[k] = c.order.PushFront(&entry{k, t})
	for c.used += t.bytes(); c.used > c.limit; {
		last := c.order.Back()
		gone := c.order.Remove(last).(*entry) //nolint:errcheck,forcetypeassert // the list holds nothing else
		delete(c.byKey, gone.key)
		c.used -= gone.tokens.bytes()
	}
}
