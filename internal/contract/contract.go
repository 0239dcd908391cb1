// SPDX-License-Identifier: Apache-2.0

// Package contract has what pdkit's own packages may do with the types of package connector, and connectors need not
// know: it makes sessions and legs, writes legs, and reads what a request's body holds. [hooks] opens the types for it.
package contract

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract/hooks"
	"github.com/pdkit/pdkit/internal/jsonedit"
	"github.com/pdkit/pdkit/internal/request"
)

//nolint:errcheck // package connector has set them: another type is a mistake there, and ends every test
var (
	// NewLeg starts a leg as the client's request without transfer members.
	NewLeg = hooks.NewLeg.(func(*connector.ClientRequest) *connector.Leg)
	// Leg returns a leg's edits, to be read.
	Leg = hooks.Leg.(func(*connector.Leg) *request.Leg)
	// Request returns what is known of a client's request, to be read.
	Request = hooks.Request.(func(*connector.ClientRequest) *request.Request)
)

// API returns what is known of a client API.
func API(a connector.API) *request.Info { return request.API(a).Info() }

// Header is one header of a leg that a connector has set.
type Header = request.Header

// NewPrefillLeg starts a prefill leg: the client's request without transfer members and, unless t.RawPrefill says
// otherwise, normalized ([request.Leg.Normalize]).
func NewPrefillLeg(r *connector.ClientRequest, t *connector.Traits) *connector.Leg {
	l := NewLeg(r)
	if !t.RawPrefill {
		Leg(l).Normalize(t.Ending.EndsByLength)
	}
	return l
}

// Body returns a leg's body in one piece.
func Body(l *connector.Leg) ([]byte, error) {
	var s jsonedit.Segments
	if err := Leg(l).Splice(&s); err != nil {
		return nil, err
	}
	return s.AppendTo(nil), nil
}

// Path returns the path that the connector has set, or that of the client's API.
func Path(l *connector.Leg) string {
	if path := Leg(l).Path; path != "" {
		return path
	}
	return l.Request().API.Path()
}

// Without returns a request without a client's own transfer members, see [request.Request.Without]. If the body has
// none it returns r itself and allocates nothing. The error is a *[connector.RequestError].
func Without(r *connector.ClientRequest, members []string) (*connector.ClientRequest, error) {
	strip, changed, err := Request(r).Without(members)
	if err != nil {
		return nil, Refusal(err)
	}
	if !changed {
		return r, nil
	}
	clone := *r
	Request(&clone).Strip = strip
	return &clone, nil
}

// Served returns a request whose legs name the model as engines do. raw is the name as JSON.
func Served(r *connector.ClientRequest, model string, raw json.RawMessage) *connector.ClientRequest {
	clone := *r
	clone.Model = model
	Request(&clone).Serve(model, raw)
	return &clone
}

// Refusal makes a *[request.Fault] a *[connector.RequestError].
func Refusal(err error) error {
	if fault, ok := errors.AsType[*request.Fault](err); ok {
		return (*connector.RequestError)(fault)
	}
	return err
}

// NewSession makes a session with a random ID for an attempt that begins now.
func NewSession(r *connector.ClientRequest, requestID string, prefill, decode discovery.Endpoint) *connector.Session {
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never returns an error: it ends the program instead
	return NewSessionWith(random, r, requestID, prefill, decode)
}

// NewSessionWith is [NewSession] with the caller's random bytes, for tests that must know the ids.
func NewSessionWith(random [16]byte, r *connector.ClientRequest, requestID string,
	prefill, decode discovery.Endpoint) *connector.Session {
	var id [2 * len(random)]byte
	hex.Encode(id[:], random[:])
	s := &connector.Session{
		ID: string(id[:]), RequestID: requestID, Model: r.Model, API: r.API, Request: r,
		Prefill: prefill, Decode: decode, Attempt: 1, CreatedAt: time.Now(), Random: random,
	}
	SetRanks(s, discovery.Rank{}, discovery.Rank{})
	return s
}

// SetRanks sets the ranks of a session: the picker's choice if it is in the range, otherwise a random rank.
func SetRanks(s *connector.Session, prefill, decode discovery.Rank) {
	s.PrefillRank = rank(s.Prefill, prefill, binary.LittleEndian.Uint32(s.Random[8:]))
	s.DecodeRank = rank(s.Decode, decode, binary.LittleEndian.Uint32(s.Random[12:]))
}

func rank(e discovery.Endpoint, chosen discovery.Rank, r uint32) int {
	ranks, err := attr.RanksOf(e)
	if err != nil || ranks.Local < 2 {
		return 0
	}
	if c, ok := chosen.Get(); ok && c < ranks.Local {
		return c
	}
	return int(r % uint32(ranks.Local))
}
