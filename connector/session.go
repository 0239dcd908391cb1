// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// Session is one attempt of one request at one pair of engines. A retry is a new Session with a new ID, because a
// handoff is single use and rendezvous protocols match by ID. The flow makes sessions; Prefill and Decode only read
// them. A test writes one as a literal, with what the code under test reads.
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

	// Random is what the attempt's random numbers and ids come from, so that both legs get the same. Two sessions with
	// the same bytes would read each other's KV.
	Random [16]byte
	// PrefillRank and DecodeRank are the data-parallel ranks of P and D that this attempt uses, among those behind the
	// engine's URL: from 0 to Local-1 of attr.RanksOf. The number among all ranks of the engine is higher by Start.
	PrefillRank, DecodeRank int
}

// Field returns a top-level member of the client's body; null counts as absent.
func (s *Session) Field(name string) (json.RawMessage, bool) { return s.Request.Field(name) }

// Uint64 returns a random number that is fixed for the attempt, so both legs get the same.
func (s *Session) Uint64() uint64 { return binary.LittleEndian.Uint64(s.Random[:8]) }

// UUID returns a version 4 UUID that is fixed for the attempt.
func (s *Session) UUID() string {
	b := s.Random
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}
