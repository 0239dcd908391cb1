// SPDX-License-Identifier: Apache-2.0

package virtual

// Outcome is what has become of the arrival with number i until now: for Route.Done.
func (f *Fleet) Outcome(i int) Outcome { return f.result.Outcomes[i] }
