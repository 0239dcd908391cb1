// SPDX-License-Identifier: Apache-2.0

// Package discovery says who the engines are: their addresses, roles and states.
//
// A [Source] publishes whole snapshots. A [Set] merges the snapshots of any number of sources and marks engines that
// fail their health probes as not ready. Readers load one immutable [Snapshot] with a single atomic read, so no request
// ever sees half a change.
//
// The package knows nothing of connectors, HTTP or flows, and imports only the standard library.
package discovery
