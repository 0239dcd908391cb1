// SPDX-License-Identifier: Apache-2.0

// Package uncarried is for tests of connectors.
package uncarried

import (
	"errors"

	"github.com/pdkit/pdkit/connector"
)

// Member names what keeps two engines from carrying a request by a connector's protocol, "" if nothing does.
func Member(c connector.KVConnector, r *connector.Request) string {
	if u, ok := errors.AsType[*connector.UnsupportedError](connector.CheckRequest(c, r)); ok {
		return u.Member
	}
	return ""
}
