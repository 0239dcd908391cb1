// SPDX-License-Identifier: Apache-2.0

package yamlfile

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/config"
)

// Fault is what is wrong at one place of a file.
type Fault struct {
	File string // "" where the reader knows it
	Line int    // from 1
	*config.FieldError
}

func newFault(file string, line int, path, problem, remedy string) Fault {
	return Fault{file, line, &config.FieldError{Path: path, Problem: problem, Remedy: remedy}}
}

// Error returns "FILE:LINE: field.path: what is wrong; what would be right", or "line LINE: …" without a file's name.
func (f Fault) Error() string {
	if f.File == "" {
		return fmt.Sprintf("line %d: %s", f.Line, f.FieldError.Error())
	}
	return fmt.Sprintf("%s:%d: %s", f.File, f.Line, f.FieldError.Error())
}

// Faults are all that is wrong with a file, as one error.
type Faults []Fault

// Error returns one line per fault.
func (fs Faults) Error() string { return fs.join("\n", len(fs)) }

// Short returns the first three faults in one line, and how many more there are: for a log.
func (fs Faults) Short() string {
	const shown = 3
	if len(fs) <= shown {
		return fs.join(" | ", len(fs))
	}
	return fmt.Sprintf("%s | and %d more", fs.join(" | ", shown), len(fs)-shown)
}

func (fs Faults) join(sep string, n int) string {
	texts := make([]string, n)
	for i := range texts {
		texts[i] = fs[i].Error()
	}
	return strings.Join(texts, sep)
}

// Sorted returns the faults in the order of the file's lines. It leaves out those that only follow from another: a
// second fault of one field, and a field that is missing because its name is misspelt or because what should hold it is
// wrong. The argument is not to be used any more.
func (fs Faults) Sorted() Faults {
	const missing = "is missing"
	slices.SortStableFunc(fs, func(a, b Fault) int { return cmp.Compare(a.Line, b.Line) })
	type place struct {
		line int
		path string
	}
	seen, misspelt := map[place]bool{}, map[string]bool{}
	for _, f := range fs {
		if near, ok := strings.CutPrefix(f.Remedy, "did you mean "); ok {
			misspelt[config.FieldPath(parentPath(f.Path), strings.TrimSuffix(near, "?"))] = true
		}
	}
	return slices.DeleteFunc(fs, func(f Fault) bool {
		at := place{f.Line, f.Path}
		follows := seen[at]
		if f.Problem == missing {
			follows = follows || misspelt[f.Path] || seen[place{f.Line, parentPath(f.Path)}]
		}
		seen[at] = true
		return follows
	})
}
