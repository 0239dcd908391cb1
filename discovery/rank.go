// SPDX-License-Identifier: Apache-2.0

package discovery

// Rank is a data-parallel rank that a picker has chosen. The zero value means that none was chosen.
type Rank struct{ after int }

// RankOf returns the choice of rank n, 0 or more. A negative n means that none was chosen.
func RankOf(n int) Rank { return Rank{max(n+1, 0)} }

// Get returns the rank, and whether one was chosen.
func (r Rank) Get() (n int, chosen bool) { return r.after - 1, r.after > 0 }
