// SPDX-License-Identifier: Apache-2.0

package jsonedit

import "encoding/json"

// SetIn returns a copy of the object obj with member name set to value, added at the end if it was not there. It is
// meant for small objects inside of a request; unlike in a Splice, value is checked whole. Errors are *SyntaxError (of
// value, if Msg says so) or *DuplicateError.
func SetIn(obj []byte, name string, value []byte) ([]byte, error) {
	if !json.Valid(value) {
		return nil, syntax(0, "new value is not valid")
	}
	return editIn(obj, Edit{Name: name, Value: value})
}

// DeleteIn returns a copy of the object obj without member name. Errors are *SyntaxError or *DuplicateError.
func DeleteIn(obj []byte, name string) ([]byte, error) {
	return editIn(obj, Edit{Name: name, Delete: true})
}

func editIn(obj []byte, e Edit) ([]byte, error) {
	var d Doc
	if err := d.ParseInto(obj); err != nil {
		return nil, err
	}
	var s Segments
	d.Splice([]Edit{e}, &s)
	return s.AppendTo(nil), nil
}
