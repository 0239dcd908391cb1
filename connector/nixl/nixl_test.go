// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/nixl"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The golden exchanges are real ones of vLLM 0.32.0, with P's responses byte for byte, and handoffs that a real D was
// given (docs/protocols/nixl.md §3). Handoffs whose form makes D die, hang or fail must not reach it. Handoffs that D
// accepts must, also those whose fault only the engines can see. The recording scripts left "stream" out where false is
// the default.
func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(nixl.Name), "testdata/golden")
}
