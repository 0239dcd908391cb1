// SPDX-License-Identifier: Apache-2.0

//go:build !race

package connectortest

// raceDetector: see race_on.go.
const raceDetector = false
