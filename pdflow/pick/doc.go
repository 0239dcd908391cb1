// SPDX-License-Identifier: Apache-2.0

// Package pick holds pickers: policies that choose the pair of engines for an attempt from a set's latest snapshot.
package pick
