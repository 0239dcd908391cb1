// SPDX-License-Identifier: Apache-2.0

// Package answerid keeps engines' addresses from clients. Some protocols write them into the X-Request-Id of the legs, and engines make
// the id of an answer of that.
package answerid

import (
	"bytes"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// Replace returns what puts the client's request id in the place of the legs' in D's answers.
func Replace(s *connector.Session, legs string) connector.EventFunc {
	own := strings.Trim(string(connector.Quote(s.RequestID)), `"`)
	return func(data []byte) ([]byte, error) {
		return bytes.ReplaceAll(data, []byte(legs), []byte(own)), nil
	}
}
