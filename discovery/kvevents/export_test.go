// SPDX-License-Identifier: Apache-2.0

package kvevents

// Quicken shortens a subscriber's limits of time.
func Quicken(s *Subscriber) { s.t = quick }
