// SPDX-License-Identifier: Apache-2.0

// Package engineversion reads and compares the releases of engines.
package engineversion

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Version is an engine's release, "0.32.0". The zero value is unknown, and counts as newer than all.
type Version struct{ Major, Minor, Patch int }

// Parse reads "0.32.0", "v0.32" or "0.32.0+cpu"; "" is the zero value.
func Parse(s string) (Version, error) {
	if s == "" {
		return Version{}, nil
	}
	text, _, _ := strings.Cut(strings.TrimPrefix(s, "v"), "+")
	parts := strings.Split(text, ".")
	var n [3]int
	for i := range n {
		if i >= len(parts) {
			break
		}
		digits := parts[i]
		if i == 2 { // 0rc1, 0.post1
			digits = strings.TrimRight(digits[:len(digits)-len(strings.TrimLeft(digits, "0123456789"))], " ")
		}
		v, err := strconv.Atoi(digits)
		if err != nil || v < 0 {
			return Version{}, fmt.Errorf("%q is not a version: want one like 0.32.0", s)
		}
		n[i] = v
	}
	if len(parts) < 2 {
		return Version{}, fmt.Errorf("%q is not a version: want one like 0.32.0", s)
	}
	return Version{n[0], n[1], n[2]}, nil
}

// Before reports whether v is an older release than major.minor.
func (v Version) Before(major, minor int) bool {
	if v == (Version{}) {
		return false
	}
	return cmp.Or(cmp.Compare(v.Major, major), cmp.Compare(v.Minor, minor)) < 0
}

// String writes 0.32.0, or "" for an unknown one.
func (v Version) String() string {
	if v == (Version{}) {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch)
}
