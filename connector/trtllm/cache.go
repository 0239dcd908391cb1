// SPDX-License-Identifier: Apache-2.0

package trtllm

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"
)

// infoCache keeps what servers say of themselves. All who ask for the same at once share one question. Its zero value is ready.
type infoCache struct {
	mu      sync.Mutex
	entries map[string]*infoEntry
}

// infoEntry is an answer, or a question under way: then done is open.
type infoEntry struct {
	done   chan struct{}
	params json.RawMessage
	err    error
	until  time.Time // set with the answer
}

var errUnasked = errors.New("trtllm: the question for a server's parameters was not put")

// get returns what is kept for a URL, or asks. A question that ended with its asker is put again by the next.
func (c *infoCache) get(ctx context.Context, url string, ask func() (json.RawMessage, error)) (json.RawMessage, error) {
	for {
		e, mine := c.enter(url)
		if mine {
			return c.fetch(ctx, url, e, ask)
		}
		select {
		case <-e.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if !errors.Is(e.err, errUnasked) {
			return e.params, e.err
		}
	}
}

// enter returns the entry for a URL; mine says that the caller has to fill it.
func (c *infoCache) enter(url string) (e *infoEntry, mine bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e = c.entries[url]; e != nil && (e.until.IsZero() || time.Now().Before(e.until)) {
		return e, false
	}
	if c.entries == nil {
		c.entries = map[string]*infoEntry{}
	}
	for old, e := range c.entries { // engines come and go
		if !e.until.IsZero() && !time.Now().Before(e.until) {
			delete(c.entries, old)
		}
	}
	e = &infoEntry{done: make(chan struct{})}
	c.entries[url] = e
	return e, true
}

// fetch fills an entry. Faults are not kept.
func (c *infoCache) fetch(ctx context.Context, url string, e *infoEntry, ask func() (json.RawMessage, error)) (params json.RawMessage, err error) {
	err = errUnasked // if ask panics
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if e.params, e.err = params, err; err != nil {
			if ctx.Err() != nil {
				e.err = errUnasked // the asker's end is nobody else's
			}
			if c.entries[url] == e {
				delete(c.entries, url)
			}
		}
		e.until = time.Now().Add(ServerInfoTTL)
		close(e.done)
	}()
	return ask()
}

// drop forgets an answer. A question under way stays.
func (c *infoCache) drop(url string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.entries[url]; e != nil && !e.until.IsZero() {
		delete(c.entries, url)
	}
}
