// SPDX-License-Identifier: Apache-2.0

//go:build race

package decide_test

const raceDetector = true
