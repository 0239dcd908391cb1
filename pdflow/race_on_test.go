// SPDX-License-Identifier: Apache-2.0

//go:build race

package pdflow_test

// raceDetector: sync.Pool then drops what it is given at random, so that bytes say nothing.
const raceDetector = true
