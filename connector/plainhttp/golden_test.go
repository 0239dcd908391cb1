// SPDX-License-Identifier: Apache-2.0

package plainhttp_test

import (
	"testing"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

// Two plain requests, as they were recorded with engines that share a folder.
func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(plainhttp.Name), "testdata/golden")
}
