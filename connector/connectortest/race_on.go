// SPDX-License-Identifier: Apache-2.0

//go:build race

package connectortest

// raceDetector: sync.Pool then drops what it is given at random, so that allocations say nothing.
const raceDetector = true
