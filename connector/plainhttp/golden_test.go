// SPDX-License-Identifier: Apache-2.0

package plainhttp_test

import (
	"testing"

	"github.com/pdkit/pdkit/connector/connectortest"
)

// Two plain requests, as they were recorded with engines that share a folder.
func TestGolden(t *testing.T) { connectortest.Golden(t, harness.New, "testdata/golden") }
