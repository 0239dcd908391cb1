// SPDX-License-Identifier: Apache-2.0

package nixl

import (
	"container/list"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"sync"
	"time"
)

// turn is what one turn of a conversation left on D: the KV of its first n tokens, prompt and response. D keeps it
// until expires.
type turn struct {
	key     string
	decode  string          // the ID of D's endpoint
	handoff json.RawMessage // D's own kv_transfer_params
	n       int             // tokens whose KV D has
	digest  [sha256.Size]byte
	expires time.Time
}

// extends reports whether a prompt begins with the tokens of the turn. P takes D's KV by position and compares nothing,
// so with any other prompt it would answer wrongly.
func (t *turn) extends(prompt []uint32) bool {
	return len(prompt) > t.n && digest(prompt[:t.n]) == t.digest
}

func digest(tokens []uint32) [sha256.Size]byte {
	b := make([]byte, 0, 4*len(tokens))
	for _, id := range tokens {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return sha256.Sum256(b)
}

// Bounds of the memory. If a conversation is forgotten, P computes its whole prompt again; nothing else happens.
const (
	maxTurns        = 4096
	maxTurnBytes    = 32 << 20 // of all handoffs
	maxHandoffBytes = 64 << 10 // 128,000 tokens in blocks of 16 need 8,000 ids of at most 8 bytes
)

// turns remembers the last turn of each conversation. All turns live for the same time, so the oldest expires first.
type turns struct {
	mu    sync.Mutex
	byKey map[string]*list.Element // of *turn
	order list.List                // oldest first
	bytes int
}

// put remembers a turn and forgets the conversation's previous one.
func (m *turns) put(t *turn, now time.Time) {
	if len(t.handoff) > maxHandoffBytes {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if old := m.byKey[t.key]; old != nil {
		m.drop(old)
	}
	for e := m.order.Front(); e != nil; e = m.order.Front() {
		//nolint:errcheck,forcetypeassert // the list holds nothing else
		if !e.Value.(*turn).expires.Before(now) && m.order.Len() < maxTurns && m.bytes+len(t.handoff) <= maxTurnBytes {
			break
		}
		m.drop(e)
	}
	if m.byKey == nil {
		m.byKey = map[string]*list.Element{}
	}
	m.byKey[t.key] = m.order.PushBack(t)
	m.bytes += len(t.handoff)
}

// get returns a conversation's last turn, if D still has its KV.
func (m *turns) get(key string, now time.Time) *turn {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.byKey[key]
	if e == nil {
		return nil
	}
	t := e.Value.(*turn) //nolint:errcheck,forcetypeassert // the list holds nothing else
	if !now.Before(t.expires) {
		m.drop(e)
		return nil
	}
	return t
}

// take forgets a turn and reports whether it was still there: D gives its KV only once.
func (m *turns) take(t *turn) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.byKey[t.key]
	if e == nil || e.Value != any(t) {
		return false
	}
	m.drop(e)
	return true
}

func (m *turns) drop(e *list.Element) {
	t := m.order.Remove(e).(*turn) //nolint:errcheck,forcetypeassert // the list holds nothing else
	delete(m.byKey, t.key)
	m.bytes -= len(t.handoff)
}
