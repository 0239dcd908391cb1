// SPDX-License-Identifier: Apache-2.0

package config

import "strings"

// Suggest returns a remedy for a name that is not among the known ones: the nearest of them, or all of them.
func Suggest(name string, known []string) string {
	if near := Nearest(name, known); near != "" {
		return "did you mean " + near + "?"
	}
	if len(known) == 0 {
		return "nothing can be set here"
	}
	return "known are " + strings.Join(known, ", ")
}

// Nearest returns the known name that name is most likely a misspelling of, or "" when none is near. It counts edits of
// one letter, without regard to case: a swap of two neighbours is one edit, and one edit is allowed for each three
// letters.
func Nearest(name string, known []string) string {
	if len(name) > maxShownName {
		return ""
	}
	best, least := "", (len(name)+2)/3+1
	for _, k := range known {
		if n := edits(strings.ToLower(name), strings.ToLower(k)); n < least {
			best, least = k, n
		}
	}
	return best
}

// edits is the optimal string alignment distance between a and b.
func edits(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			n := min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				n = min(n, rows[i-2][j-2]+1)
			}
			rows[i][j] = n
		}
	}
	return rows[len(a)][len(b)]
}
