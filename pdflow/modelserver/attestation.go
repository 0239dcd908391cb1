// SPDX-License-Identifier: Apache-2.0

package modelserver

import "github.com/pdkit/pdkit/config"

// Attestation looks for engines and pairs that corrupt KV: see package attest. A program that serves the flows runs it.
type Attestation struct {
	Mode AttestationMode `json:"mode"` // off, report or quarantine
	// from one synthetic probe to the next
	Every config.Duration `json:"every"`
}

// AttestationMode is off, report or quarantine; "" is off.
type AttestationMode string

// The modes of an attestation.
const (
	AttestationReport     AttestationMode = "report"     // what is named is told, and serves on
	AttestationQuarantine AttestationMode = "quarantine" // requests keep away from it while others are there
)

// UnmarshalJSON reads a mode, and YAML's false.
func (m *AttestationMode) UnmarshalJSON(raw []byte) error {
	switch string(raw) {
	case `"off"`, "false":
		*m = "off"
	case `"report"`:
		*m = AttestationReport
	case `"quarantine"`:
		*m = AttestationQuarantine
	default:
		return &config.FieldError{Problem: "is not a known mode", Remedy: "write off, report or quarantine"}
	}
	return nil
}

func (m *ModelServer) checkAttestation() {
	if m.Has("spec.attestation.every") && m.Spec.Attestation.Every <= 0 {
		m.fault("spec.attestation.every", "is not a period", `write the time between two probes, like "1s"`)
	}
}
