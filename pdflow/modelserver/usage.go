// SPDX-License-Identifier: Apache-2.0

package modelserver

// Usage says whose count of cached tokens the usage of responses has: see pdflow.WithEngineUsage. "" is
// UsageCorrected.
type Usage string

// Whose count of cached tokens clients get.
const (
	UsageCorrected Usage = "corrected" // prefill's, where decode counts what it took over
	UsageEngine    Usage = "engine"    // decode's, as it stands in its response
)

func (m *ModelServer) checkUsage() {
	switch m.Spec.Usage {
	case "", UsageCorrected, UsageEngine:
	default:
		m.fault("spec.usage", "is not a known way to count", "write corrected or engine")
	}
}
