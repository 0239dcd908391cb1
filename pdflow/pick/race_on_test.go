// SPDX-License-Identifier: Apache-2.0

//go:build race

package pick_test

const raceDetector = true
