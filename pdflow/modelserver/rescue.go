// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"cmp"

	"github.com/pdkit/pdkit/config"
)

// Rescue lets streams outlive their decode engine: see pdflow.WithRescue.
type Rescue struct {
	Mode          RescueMode `json:"mode"`          // on or off
	MaxPerRequest int        `json:"maxPerRequest"` // how often one request's stream may be rescued; at least 1
}

// RescueMode is on or off; "" is off.
type RescueMode string

// UnmarshalJSON reads "on" and "off", and also YAML's booleans.
func (m *RescueMode) UnmarshalJSON(raw []byte) error {
	switch string(raw) {
	case `"on"`, "true":
		*m = "on"
	case `"off"`, "false":
		*m = "off"
	default:
		return &config.FieldError{Problem: "is not a known mode", Remedy: "write on or off"}
	}
	return nil
}

// perRequest is how often a stream may be rescued.
func (r *Rescue) perRequest() int {
	if r.Mode != "on" {
		return 0
	}
	return cmp.Or(r.MaxPerRequest, 1)
}

func (m *ModelServer) checkRescue() {
	if m.Has("spec.rescue.maxPerRequest") && m.Spec.Rescue.MaxPerRequest < 1 {
		m.fault("spec.rescue.maxPerRequest", "is not a number of 1 or more", "write 1, or mode: off")
	}
}
