// SPDX-License-Identifier: Apache-2.0

// Package pick holds pickers: policies that choose the pair of engines for an attempt from a set's latest snapshot.
//
//	picker := pick.New(set, pick.PrefixAffinity())
//
// What can meet is found once per snapshot and connector; a [Policy] then chooses among it. A choice follows from the
// snapshot, from what the policy has seen so far, and from a seed.
package pick
