// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"strconv"
	"strings"
)

// FieldError is one fault of a configuration. It never holds a configured value: passwords live there.
type FieldError struct {
	Path    string // where: timeouts.prefill, endpoints[2].role; "" is the whole document
	Problem string // what is wrong: "is a number without a unit"
	Remedy  string // what would be right, may be ""
}

// Error returns "path: problem; remedy".
func (e *FieldError) Error() string {
	s := e.Problem
	if e.Path != "" {
		s = e.Path + ": " + s
	}
	if e.Remedy != "" {
		s += "; " + e.Remedy
	}
	return s
}

// In returns the fault as seen from a document that holds this one at path.
func (e *FieldError) In(path string) *FieldError {
	in := *e
	switch {
	case path == "":
	case e.Path == "":
		in.Path = path
	case e.Path[0] == '[':
		in.Path = path + e.Path
	default:
		in.Path = path + "." + e.Path
	}
	return &in
}

// FieldPath returns the path of a member of the object at parent. A name that is not plain is written as ["name"].
func FieldPath(parent, member string) string {
	plain := member != "" && len(member) <= maxShownName
	for i := 0; plain && i < len(member); i++ {
		c := member[i]
		plain = c == '_' || c == '-' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
	}
	switch {
	case !plain:
		return parent + "[" + strconv.Quote(shorten(member)) + "]"
	case parent == "":
		return member
	}
	return parent + "." + member
}

// maxShownName bounds what a message repeats of a document's own names.
const maxShownName = 64

func shorten(name string) string {
	if len(name) > maxShownName {
		return strings.ToValidUTF8(name[:maxShownName], "") + "…"
	}
	return name
}

// Within returns the faults of err as seen from a document that holds theirs at path. It returns nil for nil.
func Within(path string, err error) error {
	var all []error
	for _, fe := range FieldErrors(err) {
		all = append(all, fe.In(path))
	}
	return errors.Join(all...)
}

// FieldErrors returns the faults in err, in order, through joined and wrapped errors. An error in it that is no
// *[FieldError] becomes one without a path.
func FieldErrors(err error) []*FieldError {
	if err == nil {
		return nil
	}
	if fe, ok := err.(*FieldError); ok { //nolint:errorlint // the tree is walked here, node by node
		return []*FieldError{fe}
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []*FieldError
		for _, e := range joined.Unwrap() {
			all = append(all, FieldErrors(e)...)
		}
		return all
	}
	var fe *FieldError
	if inner := errors.Unwrap(err); inner != nil && errors.As(inner, &fe) {
		return FieldErrors(inner)
	}
	return []*FieldError{{Problem: err.Error()}}
}
