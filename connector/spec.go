// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/pdkit/pdkit/connector/config"
)

// Spec says which connector to use and how: the KVConnectorSpec of a ModelServer, as JSON. [ParseSpec] reads and checks it;
// a Spec inside a struct that [config.Decode] fills is checked the same way.
type Spec struct {
	Type      string          `json:"type,omitempty"`   // a registered name or an engine's class name; "" is http
	Config    json.RawMessage `json:"config,omitempty"` // the connector's own settings, an object; "parameters" is read as the same
	Timeouts  Timeouts        `json:"timeouts,omitzero"`
	Retry     Retry           `json:"retry,omitzero"`
	Resources Resources       `json:"resources,omitzero"`

	// Fallback is what happens when no pair could serve with KV transfer: "" or "error", "decode" (D alone), or
	// "connector" (FallbackConnector's turn).
	Fallback          string `json:"fallback,omitempty"`
	FallbackConnector *Spec  `json:"fallbackConnector,omitempty"`
	// Unsupported is what happens to requests that the protocol cannot carry: "" or "aggregate" (one engine serves them whole),
	// or "refuse".
	Unsupported string `json:"unsupported,omitempty"`
}

// The values of [Spec.Fallback] and [Spec.Unsupported].
const (
	FallbackError        = "error"
	FallbackDecode       = "decode"
	FallbackConnector    = "connector"
	UnsupportedAggregate = "aggregate"
	UnsupportedRefuse    = "refuse"
)

// Timeouts limits the phases of a request. Nil is left out (the default holds), 0 is no limit.
type Timeouts struct {
	Connect     *config.Duration `json:"connect,omitempty"`     // TCP and TLS; default 2 s
	Prefill     *config.Duration `json:"prefill,omitempty"`     // the prefill leg, until its whole answer is read; default 60 s
	Handoff     *config.Duration `json:"handoff,omitempty"`     // age of the oldest handoff that decode may use; default: the lease less 5 s, see Resolve
	Decode      *config.Duration `json:"decode,omitempty"`      // the decode leg, until its first byte; default 600 s
	Idle        *config.Duration `json:"idle,omitempty"`        // silence between two chunks of an answer; default 60 s
	Cleanup     *config.Duration `json:"cleanup,omitempty"`     // default 5 s
	HealthCheck *config.Duration `json:"healthCheck,omitempty"` // default 2 s
}

// Limits are [Timeouts] with the defaults filled in. 0 is no limit.
type Limits struct {
	Connect, Prefill, Handoff, Decode, Idle, Cleanup, HealthCheck time.Duration
}

// handoffMargin is what the default leaves of a lease for the decode request to reach the engine and the blocks to be read.
const handoffMargin = 5 * time.Second

// Resolve fills in the defaults. lease is how long the connector's handoff lives, 0 where it does not expire; then a
// Handoff left out is no limit. Of a lease under 10 s the default takes half.
func (t Timeouts) Resolve(lease time.Duration) Limits {
	handoff := max(lease-handoffMargin, lease/2, 0)
	return Limits{
		Connect:     orDefault(t.Connect, 2*time.Second),
		Prefill:     orDefault(t.Prefill, 60*time.Second),
		Handoff:     orDefault(t.Handoff, handoff),
		Decode:      orDefault(t.Decode, 600*time.Second),
		Idle:        orDefault(t.Idle, 60*time.Second),
		Cleanup:     orDefault(t.Cleanup, 5*time.Second),
		HealthCheck: orDefault(t.HealthCheck, 2*time.Second),
	}
}

// Retry says how often a request is tried at pairs of engines. Nil is left out.
type Retry struct {
	MaxAttempts *int             `json:"maxAttempts,omitempty"` // the first included, at least 1; default 2
	BackoffBase *config.Duration `json:"backoffBase,omitempty"` // pause before the second attempt; default 50 ms
	BackoffMax  *config.Duration `json:"backoffMax,omitempty"`  // longest pause; default 2 s, or BackoffBase where that is longer
}

// Attempts is [Retry] with the defaults filled in.
type Attempts struct {
	Max         int // the first included
	BackoffBase time.Duration
	BackoffMax  time.Duration
}

// Resolve fills in the defaults.
func (r Retry) Resolve() Attempts {
	a := Attempts{Max: 2, BackoffBase: orDefault(r.BackoffBase, 50*time.Millisecond)}
	if r.MaxAttempts != nil {
		a.Max = *r.MaxAttempts
	}
	a.BackoffMax = orDefault(r.BackoffMax, max(2*time.Second, a.BackoffBase))
	return a
}

func orDefault(d *config.Duration, def time.Duration) time.Duration {
	if d == nil {
		return def
	}
	return time.Duration(*d)
}

// Resources are limits of the engines' KV stores. A gateway cannot enforce them: they are rendered into the engines'
// settings by connectors that can.
type Resources struct {
	MaxMemory    config.Quantity `json:"maxMemory,omitempty"`
	MaxDisk      config.Quantity `json:"maxDisk,omitempty"`
	MaxBandwidth config.Quantity `json:"maxBandwidth,omitempty"` // bytes a second
}

// specJSON is Spec with the members that only its JSON has, and without its methods.
type specJSON struct {
	specFields
	Parameters        json.RawMessage `json:"parameters"`
	FallbackConnector json.RawMessage `json:"fallbackConnector"` // read apart: a faulty one is not a missing one
}

type specFields Spec

// ParseSpec reads a KVConnectorSpec. It refuses unknown members, wrong types and settings that contradict each other, all
// at once: [config.FieldErrors] lists them, and the Spec then holds what could be read. Config is checked to be an object and is read only by the connector itself. Empty raw is
// the zero Spec.
func ParseSpec(raw json.RawMessage) (Spec, error) {
	var s Spec
	err := s.UnmarshalJSON(raw)
	return s, err
}

// UnmarshalJSON is [ParseSpec].
func (s *Spec) UnmarshalJSON(raw []byte) error {
	var in specJSON
	faults := []error{config.Decode(raw, &in)}
	add := func(path, problem, remedy string) {
		faults = append(faults, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	faults = append(faults, wantObject("config", in.Config), wantObject("parameters", in.Parameters))
	if in.Config != nil && in.Parameters != nil {
		add("parameters", "is given besides config, which means the same", "keep one of the two")
	}
	if in.Config == nil {
		in.Config = in.Parameters
	}
	if n := in.Retry.MaxAttempts; n != nil && *n < 1 {
		add("retry.maxAttempts", "is less than 1", "write 1 for a single attempt")
	}
	if b, m := in.Retry.BackoffBase, in.Retry.BackoffMax; b != nil && m != nil && *b > *m {
		add("retry.backoffBase", "is longer than backoffMax", "write a backoffMax of at least backoffBase")
	}
	faults = append(faults, oneOf("fallback", in.Fallback, FallbackError, FallbackDecode, FallbackConnector),
		oneOf("unsupported", in.Unsupported, UnsupportedAggregate, UnsupportedRefuse))
	switch {
	case in.Fallback == FallbackConnector && in.FallbackConnector == nil:
		add("fallbackConnector", "is missing", "write the connector to fall back to: {type: NAME}")
	case in.Fallback != FallbackConnector && in.FallbackConnector != nil:
		add("fallbackConnector", "is given, but fallback is not connector", "write fallback: connector, or remove fallbackConnector")
	}
	if in.FallbackConnector != nil {
		next, err := ParseSpec(in.FallbackConnector)
		faults = append(faults, config.Within("fallbackConnector", err))
		in.specFields.FallbackConnector = &next
	}
	*s = Spec(in.specFields) // also with faults: who reports them all looks at what could be read
	return errors.Join(faults...)
}

// wantObject returns a *FieldError unless raw was left out or is an object.
func wantObject(path string, raw json.RawMessage) error {
	if raw == nil || raw[0] == '{' {
		return nil
	}
	return config.Within(path, config.Decode(raw, &struct{}{}))
}

// oneOf returns a *FieldError unless value is "" or one of known.
func oneOf(path, value string, known ...string) error {
	if value == "" {
		return nil
	}
	if slices.Contains(known, value) {
		return nil
	}
	return &config.FieldError{Path: path, Problem: "is not a known value", Remedy: config.Suggest(value, known)}
}
