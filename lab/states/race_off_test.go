// SPDX-License-Identifier: Apache-2.0

//go:build !race

package states

const thorough = true
