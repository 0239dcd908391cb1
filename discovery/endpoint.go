// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"log/slog"
	"net/url"
	"strings"
)

// Role says what an engine may be used for. It is a bit set: an engine of role both serves either leg, and a whole
// request by itself.
type Role uint8

// The roles of engines.
const (
	RolePrefill Role = 1 << iota
	RoleDecode
	RoleEncode
	RoleBoth = RolePrefill | RoleDecode
)

var roleNames = map[Role]string{RolePrefill: "prefill", RoleDecode: "decode", RoleBoth: "both", RoleEncode: "encode"}

// Has reports whether r includes every role of want.
func (r Role) Has(want Role) bool { return want != 0 && r&want == want }

// String returns prefill, decode, both or encode.
func (r Role) String() string {
	if s, ok := roleNames[r]; ok {
		return s
	}
	return fmt.Sprintf("role(%d)", uint8(r))
}

// ParseRole reads a role's name: prefill, decode, both or encode.
func ParseRole(s string) (Role, error) {
	for r, name := range roleNames {
		if name == s {
			return r, nil
		}
	}
	return 0, fmt.Errorf("role %q is not one of prefill, decode, both, encode", s)
}

// MarshalText writes the role's name.
func (r Role) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads the role's name.
func (r *Role) UnmarshalText(b []byte) error {
	v, err := ParseRole(string(b))
	if err == nil {
		*r = v
	}
	return err
}

// Phase says whether an engine takes new requests.
type Phase uint8

// The phases of an engine's life, as requests see it.
const (
	PhaseReady    Phase = iota // takes new requests
	PhaseNotReady              // listed, but it fails its health probes or has not started yet
	PhaseDraining              // finishes what it has and takes nothing new
)

// String returns ready, not-ready or draining.
func (p Phase) String() string {
	switch p {
	case PhaseReady:
		return "ready"
	case PhaseNotReady:
		return "not-ready"
	case PhaseDraining:
		return "draining"
	}
	return fmt.Sprintf("phase(%d)", uint8(p))
}

// MarshalText writes the phase's name.
func (p Phase) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Endpoint is one engine. Nobody changes an endpoint once it is published, since copies share URL and Attributes.
type Endpoint struct {
	// unique within a Set, and the same while the engine lives; host:port if a source has nothing better
	ID         string
	URL        *url.URL          // scheme, host and optional path prefix; never user info
	Role       Role              //
	Phase      Phase             //
	Group      string            // P and D form a pair only within one group; "" is a group too
	Zone, Node string            // where it runs, for locality
	Model      string            // the served model, if the source knows it
	Version    string            // the engine's version, if the source knows it
	Attributes map[string]string // per connector: bootstrapPort, sideChannelHost …; lists are comma separated
}

// Attribute returns the named attribute, or "".
func (e Endpoint) Attribute(name string) string { return e.Attributes[name] }

// Host returns the engine's host without port or brackets.
func (e Endpoint) Host() string {
	if e.URL == nil {
		return ""
	}
	return e.URL.Hostname()
}

// LogValue logs the endpoint by ID, role and phase, since addresses and attributes may be secrets.
func (e Endpoint) LogValue() slog.Value {
	return slog.GroupValue(slog.String("id", e.ID), slog.String("role", e.Role.String()),
		slog.String("phase", e.Phase.String()))
}

// New returns a ready endpoint whose ID is the URL's host and port (and path, if it has one). It refuses URLs that
// [ParseURL] refuses.
func New(rawURL string, role Role) (Endpoint, error) {
	u, err := ParseURL(rawURL)
	if err != nil {
		return Endpoint{}, err
	}
	return Endpoint{ID: u.Host + u.Path, URL: u, Role: role}, nil
}

// ParseURL reads an engine's base URL: http or https, a host, no user info, query or fragment, and no path that each
// request adds itself, like /v1. A trailing slash is removed. The error says which part is wrong and shows no more of
// the URL than that part.
func ParseURL(raw string) (*url.URL, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("not a URL: want http://HOST:PORT")
	}
	if err := checkURL(u); err != nil {
		return nil, err
	}
	u.Path, u.RawPath = strings.TrimRight(u.Path, "/"), ""
	return u, nil
}
