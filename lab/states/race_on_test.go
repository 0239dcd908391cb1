// SPDX-License-Identifier: Apache-2.0

//go:build race

package states

// thorough is false with the race detector, which takes ten times as long: it looks for races, and the rules hold
// without it too.
const thorough = false
