// SPDX-License-Identifier: Apache-2.0

//go:build race

package kvindex

const raceDetector = true
