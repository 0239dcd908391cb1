// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// HideID returns a function for a [connector.Rewriter] that replaces the legs' request id in D's responses by the
// client's. Some protocols write engines' addresses into the X-Request-Id of the legs, and engines build the id of a
// response from it.
func HideID(s *connector.Session, legs string) func([]byte) ([]byte, error) {
	own := strings.Trim(string(connector.Quote(s.RequestID)), `"`)
	return func(data []byte) ([]byte, error) {
		return bytes.ReplaceAll(data, []byte(legs), []byte(own)), nil
	}
}
