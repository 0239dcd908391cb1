// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"maps"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// Session is one attempt of one request at one pair of engines. A retry is a new Session with a new ID, because a
// handoff is single use and rendezvous protocols match by ID. The flow makes sessions; Prefill and Decode only read
// them.
type Session struct {
	ID        string // 32 random hex digits; never the client's id, which could collide with or address another's KV
	RequestID string // the client's X-Request-Id, or the one made for it
	Model     string
	API       API
	Request   *Request
	Header    http.Header // the client's; read only, nil allowed
	Prefill   discovery.Endpoint
	Decode    discovery.Endpoint
	Encode    []discovery.Endpoint // the engines of the encode stage, if there is one
	Attempt   int                  // 1 for the first
	CreatedAt time.Time
	// ExpiresAt is the end of the KV lease. Until P has answered it is CreatedAt plus the lease, then the time of P's
	// last byte plus the lease. It is zero without a lease.
	ExpiresAt time.Time

	random   [16]byte
	ranks    [2]Rank // of P and D
	prepared any
	event    Event

	mu       sync.Mutex
	metadata map[string]string
}

// NewSession makes a session with a random ID for an attempt that begins now.
func NewSession(r *Request, requestID string, prefill, decode discovery.Endpoint) *Session {
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never returns an error: it ends the program instead
	return NewSessionWith(random, r, requestID, prefill, decode)
}

// NewSessionWith is [NewSession] with the caller's random bytes, for tests that must know the ids. Two sessions with
// the same bytes would read each other's KV.
func NewSessionWith(random [16]byte, r *Request, requestID string, prefill, decode discovery.Endpoint) *Session {
	var id [2 * len(random)]byte
	hex.Encode(id[:], random[:])
	s := r.spare.newSession()
	*s = Session{
		ID: string(id[:]), RequestID: requestID, Model: r.Model, API: r.API, Request: r,
		Prefill: prefill, Decode: decode, Attempt: 1, CreatedAt: time.Now(), random: random,
	}
	return s
}

// Field returns a top-level member of the client's body; null counts as absent.
func (s *Session) Field(name string) (json.RawMessage, bool) { return s.Request.Field(name) }

// Uint64 returns a random number that is fixed for the attempt, so both legs get the same.
func (s *Session) Uint64() uint64 { return binary.LittleEndian.Uint64(s.random[:8]) }

// UUID returns a version 4 UUID that is fixed for the attempt.
func (s *Session) UUID() string {
	b := s.random
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// Rank is a data-parallel rank that a picker has chosen. The zero value means that none was chosen.
type Rank struct{ after int }

// RankOf returns the choice of rank n, 0 or more. A negative n means that none was chosen.
func RankOf(n int) Rank { return Rank{max(n+1, 0)} }

// Get returns the rank, and whether one was chosen.
func (r Rank) Get() (n int, chosen bool) { return r.after - 1, r.after > 0 }

// SetRanks sets the ranks that a picker has chosen for the attempt. The flow calls it before Prefill and Decode.
func (s *Session) SetRanks(prefill, decode Rank) { s.ranks = [2]Rank{prefill, decode} }

// PrefillRank returns the data-parallel rank of P that this attempt uses: from 0 to dpSize-1 of P's attribute dpSize,
// or 0 without that attribute. It is the picker's choice if that is in the range, otherwise a random rank. It is fixed
// for the attempt.
func (s *Session) PrefillRank() int {
	return rank(s.Prefill, s.ranks[0], binary.LittleEndian.Uint32(s.random[8:]))
}

// DecodeRank is the same as PrefillRank for D.
func (s *Session) DecodeRank() int {
	return rank(s.Decode, s.ranks[1], binary.LittleEndian.Uint32(s.random[12:]))
}

func rank(e discovery.Endpoint, chosen Rank, r uint32) int {
	n, err := strconv.ParseUint(e.Attribute("dpSize"), 10, 16) // no engine has more, and a modulus of 0 would panic
	if err != nil || n < 2 {
		return 0
	}
	if c, ok := chosen.Get(); ok && c < int(n) {
		return c
	}
	return int(r % uint32(n))
}

// SetMetadata keeps a value for the attempt. It and Metadata may be called concurrently.
func (s *Session) SetMetadata(key, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.metadata == nil {
		s.metadata = map[string]string{}
	}
	s.metadata[key] = value
}

// Metadata returns a copy of the values that SetMetadata has kept.
func (s *Session) Metadata() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := make(map[string]string, len(s.metadata))
	maps.Copy(m, s.metadata)
	return m
}

// Prepared returns what the connector's [Preparer] found before the legs, or nil.
func (s *Session) Prepared() any { return s.prepared }

// SetPrepared sets the value of Prepared. The flow calls it before Prefill and Decode.
func (s *Session) SetPrepared(v any) { s.prepared = v }

// Event returns the event for which the connector's [Expecter] waited. It is zero before the event.
func (s *Session) Event() Event { return s.event }

// SetEvent sets the value of Event. The flow calls it before it builds the leg that follows the event.
func (s *Session) SetEvent(e Event) { s.event = e }
