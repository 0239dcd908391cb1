// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"encoding/json"
	"errors"
	"slices"
	"time"
)

// Spec says which connector to use and how: the KVConnectorSpec of a ModelServer, as JSON. [ParseSpec] reads and checks
// it; a Spec inside a struct that [Decode] fills is checked the same way.
type Spec struct {
	Type string `json:"type,omitempty"` // a registered name or an engine's class name; "" is http
	// the connector's own settings, an object; "parameters" is read as the same
	Config    json.RawMessage `json:"config,omitempty"`
	Timeouts  Timeouts        `json:"timeouts,omitzero"`
	Retry     Retry           `json:"retry,omitzero"`
	Resources Resources       `json:"resources,omitzero"`

	// Fallback is what happens when no pair could serve with KV transfer: "" or "error", "decode" (D alone), or
	// "connector" (FallbackConnector's turn).
	Fallback          Fallback `json:"fallback,omitempty"`
	FallbackConnector *Spec    `json:"fallbackConnector,omitempty"`
	// Unsupported is what happens to requests that the protocol cannot carry: "" or "aggregate" (one engine serves them
	// whole), or "refuse".
	Unsupported Unsupported `json:"unsupported,omitempty"`
}

// Fallback is what happens when no pair could serve a request with KV transfer. "" is FallbackError.
type Fallback string

// The fallbacks.
const (
	FallbackError     Fallback = "error"     // the client gets the error
	FallbackDecode    Fallback = "decode"    // one decode engine serves the request alone
	FallbackConnector Fallback = "connector" // Spec.FallbackConnector has its turn
)

// Unsupported is what happens to requests that the protocol cannot carry. "" is UnsupportedAggregate.
type Unsupported string

// The policies.
const (
	UnsupportedAggregate Unsupported = "aggregate" // one engine serves them
	UnsupportedRefuse    Unsupported = "refuse"    // 400, naming the member
)

// None is the duration that stands for no limit. A duration of zero stands for the default.
const None time.Duration = -1

// Timeouts limits the phases of a request. Zero is the default, [None] no limit. In JSON a member that is left out is
// the default, and "0" is no limit.
type Timeouts struct {
	Connect time.Duration `json:"connect"` // TCP and TLS, of package transport; default 2 s
	Prefill time.Duration `json:"prefill"` // the prefill leg, until its whole response is read; default 60 s
	// oldest handoff that decode may use, from P's last byte; default: the lease less 5 s, see Resolve
	Handoff time.Duration `json:"handoff"`
	// from P's last byte to D's first event, where P answers first; of a response that is no stream, until a synthetic
	// probe asks whether the pair hangs; default [None]: Decode alone limits it
	Transfer time.Duration `json:"transfer"`
	// the decode leg (together: from P's response), until its first byte; default 600 s
	Decode      time.Duration `json:"decode"`
	Idle        time.Duration `json:"idle"`        // silence until an engine's health is asked; default 60 s
	Silence     time.Duration `json:"silence"`     // silence of a response whose engine is well; default 10 min
	Cleanup     time.Duration `json:"cleanup"`     // a connector's cleaning up; default 5 s
	HealthCheck time.Duration `json:"healthCheck"` // one probe of package pdflow/health; default 2 s

	// The client's side. A Spec has no words for these.

	// reading the client's body; default 60 s. A body that brings nothing in a sixth of it, or then too little to fill
	// the memory that it was given in time, is ended earlier
	Body  time.Duration `json:"-"`
	Write time.Duration `json:"-"` // one write to the client; default 30 s
	// for how long the caller of pdflow's Flow.Begin may make no call on its request, reads of the response's Body
	// included, before the flow ends the request; a relayed response must end within it; default 15 min
	Steps time.Duration `json:"-"`
}

// handoffMargin is what the default leaves of a lease for the decode request to reach the engine and the blocks to be
// read.
const handoffMargin = 5 * time.Second

// Resolve fills in the defaults. lease is how long the connector's handoff lives, 0 where it does not expire: then the
// default of Handoff is [None]. Of a lease under 10 s the default takes half.
func (t Timeouts) Resolve(lease time.Duration) Timeouts {
	handoff := max(lease-handoffMargin, lease/2)
	if handoff <= 0 {
		handoff = None
	}
	return t.Or(Timeouts{
		Connect: 2 * time.Second, Prefill: 60 * time.Second, Handoff: handoff, Transfer: None,
		Decode: 600 * time.Second, Idle: 60 * time.Second, Silence: 10 * time.Minute, Cleanup: 5 * time.Second,
		HealthCheck: 2 * time.Second, Body: 60 * time.Second, Write: 30 * time.Second, Steps: 15 * time.Minute,
	})
}

// Or returns t with the limits of other where t has none of its own.
func (t Timeouts) Or(other Timeouts) Timeouts {
	mine, others := t.all(), other.all()
	for i, d := range mine {
		*d = cmp.Or(*d, *others[i])
	}
	return t
}

func (t *Timeouts) all() [12]*time.Duration {
	return [...]*time.Duration{
		&t.Connect, &t.Prefill, &t.Handoff, &t.Transfer, &t.Decode, &t.Idle, &t.Silence, &t.Cleanup, &t.HealthCheck,
		&t.Body, &t.Write, &t.Steps,
	}
}

// Check returns an error if a limit is negative and not [None].
func (t Timeouts) Check() error {
	for _, d := range t.all() {
		if *d < 0 && *d != None {
			return errors.New("a timeout is negative: write config.None for no limit, 0 for the default")
		}
	}
	return nil
}

// timeoutsJSON is what a Spec says of Timeouts, in the order of all.
type timeoutsJSON struct {
	Connect     *Duration `json:"connect,omitempty"`
	Prefill     *Duration `json:"prefill,omitempty"`
	Handoff     *Duration `json:"handoff,omitempty"`
	Transfer    *Duration `json:"transfer,omitempty"`
	Decode      *Duration `json:"decode,omitempty"`
	Idle        *Duration `json:"idle,omitempty"`
	Silence     *Duration `json:"silence,omitempty"`
	Cleanup     *Duration `json:"cleanup,omitempty"`
	HealthCheck *Duration `json:"healthCheck,omitempty"`
}

// UnmarshalJSON reads the limits that a Spec has, in [Duration]'s syntax.
func (t *Timeouts) UnmarshalJSON(raw []byte) error {
	var in timeoutsJSON
	err := Decode(raw, &in)
	*t = Timeouts{given(in.Connect), given(in.Prefill), given(in.Handoff), given(in.Transfer),
		given(in.Decode), given(in.Idle), given(in.Silence), given(in.Cleanup), given(in.HealthCheck), t.Body,
		t.Write, t.Steps}
	return err
}

// MarshalJSON writes what UnmarshalJSON reads.
func (t Timeouts) MarshalJSON() ([]byte, error) {
	return json.Marshal(timeoutsJSON{told(t.Connect), told(t.Prefill), told(t.Handoff), told(t.Transfer),
		told(t.Decode), told(t.Idle), told(t.Silence), told(t.Cleanup), told(t.HealthCheck)})
}

// given is a duration of a JSON document, where 0 is no limit and what is left out is the default.
func given(d *Duration) time.Duration {
	switch {
	case d == nil:
		return 0
	case *d == 0:
		return None
	}
	return time.Duration(*d)
}

// told is the reverse of given.
func told(d time.Duration) *Duration {
	if d == 0 {
		return nil
	}
	return new(Duration(max(d, 0)))
}

// Retry says how often a request is tried at pairs of engines. Zero is the default.
type Retry struct {
	MaxAttempts int `json:"maxAttempts"` // the first included; default 2
	// longest pause before the second attempt, doubled for each further one; the pause is random, up to that; default
	// 50 ms, None: no pause
	BackoffBase time.Duration `json:"backoffBase"`
	// longest pause, also if an engine asks for more by Retry-After; default 2 s, or BackoffBase where that is longer
	BackoffMax time.Duration `json:"backoffMax"`
	// share of a flow's requests of the last 10 s that may be retries; three at a time are always allowed; default 0.2
	Budget float64 `json:"budget"`
	// a prefill that ran out of time is not retried, although another prefill engine is there
	TimeoutFinal bool `json:"timeoutFinal"`
	// after how long without a response of prefill a second prefill engine is asked, too, within Budget; the first
	// response serves, and the other leg is cancelled. Only where P runs before D and a cancelled P leaves nothing
	// behind: see docs/retries.md. Default: never
	Hedge time.Duration `json:"hedge"`
}

// Resolve fills in the defaults.
func (r Retry) Resolve() Retry {
	r.MaxAttempts = cmp.Or(r.MaxAttempts, 2)
	r.BackoffBase = cmp.Or(r.BackoffBase, 50*time.Millisecond)
	r.BackoffMax = cmp.Or(r.BackoffMax, max(2*time.Second, r.BackoffBase))
	r.Budget = cmp.Or(r.Budget, 0.2)
	return r
}

// Or returns r with the bounds of other where r has none of its own.
func (r Retry) Or(other Retry) Retry {
	return Retry{cmp.Or(r.MaxAttempts, other.MaxAttempts), cmp.Or(r.BackoffBase, other.BackoffBase),
		cmp.Or(r.BackoffMax, other.BackoffMax), cmp.Or(r.Budget, other.Budget), r.TimeoutFinal || other.TimeoutFinal,
		cmp.Or(r.Hedge, other.Hedge)}
}

// Check returns an error if a bound is negative and not [None], or the backoffs contradict each other.
func (r Retry) Check() error {
	switch {
	case r.MaxAttempts < 0:
		return errors.New("MaxAttempts is negative: write 1 for a single attempt, 0 for the default")
	case r.BackoffBase < 0 && r.BackoffBase != None, r.BackoffMax < 0 && r.BackoffMax != None:
		return errors.New("a backoff is negative: write config.None for no pause, 0 for the default")
	case r.BackoffMax > 0 && r.BackoffBase > r.BackoffMax:
		return errors.New("BackoffBase is longer than BackoffMax")
	case r.Hedge < 0 && r.Hedge != None:
		return errors.New("the time before a second prefill is negative: write config.None or 0 for never")
	case !(r.Budget >= 0): // nor is NaN
		return errors.New("the budget is negative: write MaxAttempts 1 for no retries, 0 for the default")
	}
	return nil
}

// retryJSON is Retry as a Spec has it.
type retryJSON struct {
	MaxAttempts  *int      `json:"maxAttempts,omitempty"`
	BackoffBase  *Duration `json:"backoffBase,omitempty"`
	BackoffMax   *Duration `json:"backoffMax,omitempty"`
	Budget       *float64  `json:"budget,omitempty"`
	TimeoutFinal *bool     `json:"timeoutFinal,omitempty"`
	Hedge        *Duration `json:"hedge,omitempty"`
}

// UnmarshalJSON reads the members of a Spec's retry.
func (r *Retry) UnmarshalJSON(raw []byte) error {
	var in retryJSON
	faults := []error{Decode(raw, &in)}
	if in.MaxAttempts != nil {
		if r.MaxAttempts = *in.MaxAttempts; r.MaxAttempts < 1 {
			faults = append(
				faults, &FieldError{Path: "maxAttempts", Problem: "is less than 1",
					Remedy: "write 1 for a single attempt"},
			)
		}
	}
	r.BackoffBase, r.BackoffMax, r.Hedge = given(in.BackoffBase), given(in.BackoffMax), given(in.Hedge)
	if in.BackoffMax != nil && r.BackoffBase > time.Duration(*in.BackoffMax) {
		faults = append(faults, &FieldError{
			Path: "backoffBase", Problem: "is longer than backoffMax",
			Remedy: "write a backoffMax of at least backoffBase",
		})
	}
	if in.Budget != nil {
		if r.Budget = *in.Budget; r.Budget <= 0 {
			faults = append(faults, &FieldError{Path: "budget", Problem: "is not positive",
				Remedy: "write maxAttempts: 1 for no retries"})
		}
	}
	if in.TimeoutFinal != nil {
		r.TimeoutFinal = *in.TimeoutFinal
	}
	return errors.Join(faults...)
}

// MarshalJSON writes what UnmarshalJSON reads.
func (r Retry) MarshalJSON() ([]byte, error) {
	out := retryJSON{BackoffBase: told(r.BackoffBase), BackoffMax: told(r.BackoffMax), Hedge: told(r.Hedge)}
	if r.MaxAttempts != 0 {
		out.MaxAttempts = &r.MaxAttempts
	}
	if r.Budget != 0 {
		out.Budget = &r.Budget
	}
	if r.TimeoutFinal {
		out.TimeoutFinal = &r.TimeoutFinal
	}
	return json.Marshal(out)
}

// Resources are limits of the engines' KV stores. A gateway cannot enforce them: they are rendered into the engines'
// settings by connectors that can.
type Resources struct {
	MaxMemory    Quantity `json:"maxMemory,omitempty"`
	MaxDisk      Quantity `json:"maxDisk,omitempty"`
	MaxBandwidth Quantity `json:"maxBandwidth,omitempty"` // bytes a second
}

// specJSON is Spec with the members that only its JSON has, and without its methods.
type specJSON struct {
	specFields
	Parameters        json.RawMessage `json:"parameters"`
	FallbackConnector json.RawMessage `json:"fallbackConnector"` // read apart: a faulty one is not a missing one
}

type specFields Spec

// ParseSpec reads a KVConnectorSpec. It refuses unknown members, wrong types and settings that contradict each other,
// all at once: [FieldErrors] lists them, and the Spec then holds what could be read. Config is checked to be an object
// and is read only by the connector itself. Empty raw is the zero Spec.
func ParseSpec(raw json.RawMessage) (Spec, error) {
	var s Spec
	err := s.UnmarshalJSON(raw)
	return s, err
}

// UnmarshalJSON is [ParseSpec].
func (s *Spec) UnmarshalJSON(raw []byte) error {
	var in specJSON
	faults := []error{Decode(raw, &in)}
	add := func(path, problem, remedy string) {
		faults = append(faults, &FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	faults = append(faults, wantObject("config", in.Config), wantObject("parameters", in.Parameters))
	if in.Config != nil && in.Parameters != nil {
		add("parameters", "is given besides config, which means the same", "keep one of the two")
	}
	if in.Config == nil {
		in.Config = in.Parameters
	}
	faults = append(faults, oneOf("fallback", in.Fallback, FallbackError, FallbackDecode, FallbackConnector),
		oneOf("unsupported", in.Unsupported, UnsupportedAggregate, UnsupportedRefuse))
	switch {
	case in.Fallback == FallbackConnector && in.FallbackConnector == nil:
		add("fallbackConnector", "is missing", "write the connector to fall back to: {type: NAME}")
	case in.Fallback != FallbackConnector && in.FallbackConnector != nil:
		add("fallbackConnector", "is given, but fallback is not connector",
			"write fallback: connector, or remove fallbackConnector")
	}
	if in.FallbackConnector != nil {
		next, err := ParseSpec(in.FallbackConnector)
		faults = append(faults, Within("fallbackConnector", err))
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
	return Within(path, Decode(raw, &struct{}{}))
}

// oneOf returns a *FieldError unless value is "" or one of known.
func oneOf[T ~string](path string, value T, known ...T) error {
	if value == "" || slices.Contains(known, value) {
		return nil
	}
	names := make([]string, len(known))
	for i, k := range known {
		names[i] = string(k)
	}
	return &FieldError{Path: path, Problem: "is not a known value", Remedy: Suggest(string(value), names)}
}
