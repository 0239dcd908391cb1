// SPDX-License-Identifier: Apache-2.0

// Package uncarried helps the tests of connectors.
package uncarried

import (
	"errors"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
)

// Member names the member because of which two engines cannot serve a request by a connector's protocol; "" if there is
// none.
func Member(c connector.KVConnector, r *connector.ClientRequest) string {
	if u, ok := errors.AsType[*connector.UnsupportedError](check.Of(c).CheckRequest(r)); ok {
		return u.Member
	}
	return ""
}
