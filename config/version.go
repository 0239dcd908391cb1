// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// EngineVersion is an engine's release, "0.32.0". The zero value is unknown, and counts as newer than all.
type EngineVersion struct{ Major, Minor, Patch int }

// ParseEngineVersion reads "0.32.0", "v0.32" or "0.32.0+cpu"; "" is the zero value.
func ParseEngineVersion(s string) (EngineVersion, error) {
	if s == "" {
		return EngineVersion{}, nil
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
			return EngineVersion{}, fmt.Errorf("%q is not a version: want one like 0.32.0", s)
		}
		n[i] = v
	}
	if len(parts) < 2 {
		return EngineVersion{}, fmt.Errorf("%q is not a version: want one like 0.32.0", s)
	}
	return EngineVersion{n[0], n[1], n[2]}, nil
}

// Before reports whether v is an older release than major.minor.
func (v EngineVersion) Before(major, minor int) bool {
	if v == (EngineVersion{}) {
		return false
	}
	return cmp.Or(cmp.Compare(v.Major, major), cmp.Compare(v.Minor, minor)) < 0
}

// String writes 0.32.0, or "" for an unknown one.
func (v EngineVersion) String() string {
	if v == (EngineVersion{}) {
		return ""
	}
	return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch)
}
