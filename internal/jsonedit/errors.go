// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"fmt"
	"unicode/utf8"
)

// SyntaxError reports the first place where a text stops being what was asked for. Neither Msg nor Error quotes the
// text, so both may be logged and sent to a client.
type SyntaxError struct {
	Offset int64 // bytes from the start of the text
	Msg    string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("invalid JSON at byte %d: %s", e.Offset, e.Msg)
}

// DuplicateError reports a name that stands twice in one object.
type DuplicateError struct {
	Name   string // unescaped, whole
	Offset int64  // of the second key's opening quote
}

// maxNameInError bounds what a client can make us write into a log.
const maxNameInError = 64

// Error shows the first 64 bytes of the name, escaped for one line of text.
func (e *DuplicateError) Error() string {
	name, more := e.Name, ""
	if len(name) > maxNameInError {
		cut := maxNameInError
		for cut > 0 && !utf8.RuneStart(name[cut]) {
			cut--
		}
		name, more = name[:cut], "..."
	}
	return fmt.Sprintf("duplicate member %+q%s at byte %d", name, more, e.Offset)
}

func syntax(off int, msg string) error {
	return &SyntaxError{Offset: int64(off), Msg: msg}
}
