// SPDX-License-Identifier: Apache-2.0

// Package pick holds pickers: policies that choose the pair of engines for an attempt from a set's latest snapshot.
//
//	picker := pick.New(set, pick.PrefixAffinity())
//
// The picker finds once per snapshot and connector which engines can form a pair. A [Policy] then chooses one of these
// pairs. The choice depends on the snapshot, on what the policy has seen so far, and on a seed.
package pick
