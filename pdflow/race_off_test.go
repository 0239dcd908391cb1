// SPDX-License-Identifier: Apache-2.0

//go:build !race

package pdflow_test

const raceDetector = false
