// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"time"
)

// Duration is a length of time whose JSON is a string in Go's syntax, as the Kubernetes API writes durations: "30s",
// "1m30s", "0". It is never negative when decoded.
type Duration time.Duration

const durationRemedy = `write a number and a unit, like "30s" or "1m30s"`

// MarshalJSON writes the string form.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON reads the string form, or the number 0, which is the same in every unit. Any other number is refused,
// because its unit could only be guessed. The error is a *[FieldError] without a path.
func (d *Duration) UnmarshalJSON(raw []byte) error {
	var s string
	switch kind := kindOf(raw); {
	case kind == "null":
		return nil
	case string(raw) == "0":
		*d = 0
		return nil
	case kind == "number":
		return &FieldError{Problem: "is a number without a unit", Remedy: durationRemedy}
	case kind != "string":
		return wrongKind(raw, "a duration", durationRemedy)
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return &FieldError{Problem: "is not a duration", Remedy: durationRemedy}
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		return &FieldError{Problem: "is not a duration", Remedy: durationRemedy}
	}
	if v < 0 {
		return &FieldError{Problem: "is negative", Remedy: `write a positive duration, or "0s"`}
	}
	*d = Duration(v)
	return nil
}

// String returns Go's form.
func (d Duration) String() string { return time.Duration(d).String() }
