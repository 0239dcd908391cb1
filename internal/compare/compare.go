// SPDX-License-Identifier: Apache-2.0

// Package compare compares attributes of engines' entries.
package compare

import (
	"slices"
	"strings"
)

// Same reports whether two values are the same but for white space around them.
func Same(a, b string) bool { return strings.TrimSpace(a) == strings.TrimSpace(b) }

// Shared reports whether two comma separated lists have an element in common.
func Shared(a, b string) bool {
	of := strings.Split(b, ",")
	for x := range strings.SplitSeq(a, ",") {
		if x = strings.TrimSpace(x); x != "" && slices.ContainsFunc(of, func(y string) bool { return Same(x, y) }) {
			return true
		}
	}
	return false
}
