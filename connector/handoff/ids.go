// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"bytes"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// HideID returns what puts the client's request id in the place of the legs' in D's responses, for a
// [connector.Rewriter]. Some protocols write engines' addresses into the X-Request-Id of the legs, and engines make the
// id of a response of that.
func HideID(s *connector.Session, legs string) connector.EventFunc {
	own := strings.Trim(string(connector.Quote(s.RequestID)), `"`)
	return func(data []byte) ([]byte, error) {
		return bytes.ReplaceAll(data, []byte(legs), []byte(own)), nil
	}
}
