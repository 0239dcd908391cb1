// SPDX-License-Identifier: Apache-2.0

package plainhttp_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var harness = connectortest.Harness{
	Name:   plainhttp.Name,
	Config: json.RawMessage(`{"requestTimeout":"7s","maxRetries":3,"kvTransferMethod":"implicit"}`),
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }

// Two plain requests, as they were recorded with engines that share a folder.
func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(plainhttp.Name), "testdata/golden")
}

func TestDecodeNeedsNoResponse(t *testing.T) {
	_, err := play.TryDecode(&plainhttp.Connector{}, play.Session(t, connector.APIChat, `{"messages":[]}`), nil)
	require.NoError(t, err, "the zero value is ready")
}

func TestSettingsOfOldFiles(t *testing.T) {
	for settings, want := range map[string]struct {
		prefill  time.Duration
		attempts int
	}{
		``: {}, `{}`: {}, `null`: {},
		`{"kvTransferMethod":"implicit"}`:         {},
		`{"requestTimeout":"30s","maxRetries":3}`: {30 * time.Second, 4},
		`{"requestTimeout":"0s","maxRetries":0}`:  {},
	} {
		traits := play.Open(t, "", settings).Traits()
		assert.Equal(t, want.prefill, traits.Timeouts.Prefill, settings)
		assert.Equal(t, want.attempts, traits.Retry.MaxAttempts, "the first attempt included: %s", settings)
	}
}

func TestBadSettings(t *testing.T) {
	play.Refuses(t, plainhttp.Name, map[string]string{
		`{"kvTransferMethod":"explicit"}`: "kvTransferMethod … use type nixl",
		`{"kvTransferMethod":"magic"}`:    "kvTransferMethod … implicit is the only one",
		`{"requestTimeout":"-1s"}`:        "requestTimeout",
		`{"requestTimeout":30}`:           "requestTimeout",
		`{"maxRetries":-1}`:               "maxRetries",
		`{"maxRetry":1}`:                  "maxRetry … maxRetries",
	})
}
