// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"strconv"
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
	Request   *ClientRequest
	Header    http.Header // the client's; read only, nil allowed
	Prefill   discovery.Endpoint
	Decode    discovery.Endpoint
	Encode    []discovery.Endpoint // the engines of the encode stage, if there is one
	Attempt   int                  // 1 for the first
	CreatedAt time.Time
	// ExpiresAt is the end of the KV lease. Until P has answered it is CreatedAt plus the lease, then the time of P's
	// last byte plus the lease. It is zero without a lease.
	ExpiresAt time.Time

	Prepared any             // what the connector's [Preparer] found before the legs, or nil
	Event    Event           // for which the connector's [Expecter] waited; zero before it came
	Encoded  json.RawMessage // what the connector's [Encoder] made of the encode engines' responses, for Prefill

	random [16]byte
	ranks  [2]Rank // of P and D
}

// NewSession makes a session with a random ID for an attempt that begins now.
func NewSession(r *ClientRequest, requestID string, prefill, decode discovery.Endpoint) *Session {
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never returns an error: it ends the program instead
	return NewSessionWith(random, r, requestID, prefill, decode)
}

// NewSessionWith is [NewSession] with the caller's random bytes, for tests that must know the ids. Two sessions with
// the same bytes would read each other's KV.
func NewSessionWith(random [16]byte, r *ClientRequest, requestID string, prefill, decode discovery.Endpoint) *Session {
	var id [2 * len(random)]byte
	hex.Encode(id[:], random[:])
	return &Session{
		ID: string(id[:]), RequestID: requestID, Model: r.Model, API: r.API, Request: r,
		Prefill: prefill, Decode: decode, Attempt: 1, CreatedAt: time.Now(), random: random,
	}
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
