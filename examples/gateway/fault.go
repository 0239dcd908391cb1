// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector/config"
)

// fault is what is wrong at one place of a configuration file.
type fault struct {
	file string
	line int
	*config.FieldError
}

// Error returns "FILE:LINE: field.path: what is wrong; what would be right".
func (f fault) Error() string { return fmt.Sprintf("%s:%d: %s", f.file, f.line, f.FieldError.Error()) }

// faults are all that is wrong with a configuration, as one error.
type faults []fault

// Error returns one line per fault.
func (fs faults) Error() string {
	lines := make([]string, len(fs))
	for i, f := range fs {
		lines[i] = f.Error()
	}
	return strings.Join(lines, "\n")
}

// sorted returns the faults in the order of the file's lines, without those that only follow from another: a second one
// of the same field, and a field that is missing because its name is misspelt or what should hold it is wrong.
func (fs faults) sorted() faults {
	slices.SortStableFunc(fs, func(a, b fault) int { return cmp.Compare(a.line, b.line) })
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
	return slices.DeleteFunc(fs, func(f fault) bool {
		at := place{f.line, f.Path}
		follows := seen[at]
		if f.Problem == missing {
			follows = follows || misspelt[f.Path] || seen[place{f.line, parentPath(f.Path)}]
		}
		seen[at] = true
		return follows
	})
}

// fields returns the faults without their places, nil for none: the first of them, and how many others there are.
func (fs faults) fields() error {
	var errs []error
	for i, f := range fs {
		if i == maxFaults {
			errs = append(errs, fmt.Errorf("and %d more", len(fs)-maxFaults))
			break
		}
		errs = append(errs, f.FieldError)
	}
	return errors.Join(errs...)
}

// missing is the problem of a field that must be given and is not.
const missing = "is missing"
