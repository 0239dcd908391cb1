// SPDX-License-Identifier: Apache-2.0

package trtllm

import (
	"net/http"
	"strings"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// window is the attention window that events name: that of a model with full attention.
const window = 32768

// events are KV-cache events until POST /kv_cache_events takes them (_utils.py: KVCacheEventSerializer;
// kvCacheEventManager.cpp). Of more than most the oldest are lost.
type events struct {
	most int

	mu   sync.Mutex
	next uint64
	list []python.Object
	last *storedEvent // what the next block may follow
}

// storedEvent is the last of the list.
type storedEvent struct {
	hash   uint64
	blocks []python.Object
	data   python.Object
}

func newEvents(most, blocks int) *events {
	e := &events{most: most}
	e.add(python.Object{"type", "created", "num_blocks_per_cache_level", []int{blocks, 0}})
	return e
}

// add appends an event. The caller holds the lock, or is alone.
func (e *events) add(data python.Object) {
	e.list = append(e.list, python.Object{"event_id", e.next, "data", data, "window_size", window})
	e.next++
	if len(e.list) > e.most {
		e.list = e.list[1:]
	}
	e.last = nil
}

func hashOf(key core.TokenKey) uint64 { return core.Mix(key[0], key[1]) }

// Stored tells of a full block. It joins the event before if it follows its last block.
func (e *events) Stored(s core.StoredBlock) {
	e.mu.Lock()
	defer e.mu.Unlock()
	tokens := make([]python.Object, 0, len(s.Tokens))
	for _, token := range s.Tokens {
		tokens = append(tokens, python.Object{"type", "unique_token", "token_id", token, "token_extra_id", 0})
	}
	var salt any
	if text, _, _ := strings.Cut(s.Salt, "\x00"); text != "" {
		salt = text
	}
	hash := hashOf(s.Key)
	block := python.Object{"type", "stored_block", "block_hash", hash, "tokens", tokens, "cache_level", 0,
		"priority", 35, "mm_keys", []any{}, "cache_salt", salt}
	last := e.last
	if last == nil || s.First || last.hash != hashOf(s.Parent) {
		var parent any
		if !s.First {
			parent = hashOf(s.Parent)
		}
		last = &storedEvent{data: python.Object{"type", "stored", "parent_hash", parent, "blocks", nil}}
		e.add(last.data)
	}
	last.hash, last.blocks = hash, append(last.blocks, block)
	last.data[len(last.data)-1] = last.blocks
	e.last = last
}

// Removed tells that a block was evicted.
func (e *events) Removed(key core.TokenKey) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.add(python.Object{"type", "removed", "block_hashes", []uint64{hashOf(key)}})
}

// take responds with what is there, which is then gone; without events with an empty list.
func (e *events) take(w http.ResponseWriter) {
	list := []python.Object{}
	if e != nil {
		e.mu.Lock()
		list, e.list, e.last = append(list, e.list...), nil, nil
		e.mu.Unlock()
	}
	api.WriteJSON(w, http.StatusOK, python.Encode(list))
}
