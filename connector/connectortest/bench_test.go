// SPDX-License-Identifier: Apache-2.0

package connectortest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
)

// heard is a test that is told faults.
type heard struct {
	testing.TB
	faults []string
}

func (h *heard) Helper() {}

func (h *heard) Errorf(format string, args ...any) {
	h.faults = append(h.faults, fmt.Sprintf(format, args...))
}

// costly is the connector http with so many allocations more in a decode leg.
type costly struct {
	connector.KVConnector
	allocations int
}

var kept []byte

func (c costly) Decode(_ context.Context, _ *connector.Session, _ *connector.PrefillResult, _ *connector.Leg) error {
	for range c.allocations {
		kept = make([]byte, 16)
	}
	if c.allocations < 0 {
		return connector.NoTransfer("for the test")
	}
	return nil
}

func measured(t testing.TB, c connector.KVConnector) connectortest.Measured {
	t.Helper()
	r, err := connector.ParseRequest(connector.APIChat, []byte(connectortest.Chat2KB()))
	require.NoError(t, err)
	return connectortest.Measured{Connector: c, Session: connector.NewSession(r, "id", discovery.Endpoint{},
		discovery.Endpoint{})}
}

func TestTheChatHasTwoKilobytes(t *testing.T) {
	assert.True(t, json.Valid([]byte(connectortest.Chat2KB())))
	assert.InDelta(t, 2048, len(connectortest.Chat2KB()), 50)
}

// Passthrough is the measure, so it costs nothing over it; ten allocations are within the budget, eleven are not, and
// neither is an error.
func TestLegBudgetCountsWhatIsOverPassthrough(t *testing.T) {
	http, err := plainhttp.New(nil)
	require.NoError(t, err)
	for allocations, says := range map[int]string{0: "", 10: "", 11: "11 over the plain leg: the budget is 10",
		-1: "no usable KV handoff"} {
		if allocations > 0 && connectortest.RaceDetector {
			continue // it counts nothing then
		}
		h := &heard{TB: t}
		connectortest.LegBudget(h, measured(t, costly{http, allocations}))
		if says == "" {
			assert.Empty(t, h.faults, "%d", allocations)
			continue
		}
		require.Len(t, h.faults, 1, "%d", allocations)
		assert.Contains(t, h.faults[0], "http/decode: ")
		assert.Contains(t, h.faults[0], says)
	}
}

// The legs over which a connector's are measured are those of the connector http: it edits nothing.
func TestPlainHTTPEditsNothing(t *testing.T) {
	http, err := plainhttp.New(nil)
	require.NoError(t, err)
	s := measured(t, http).Session
	traits := http.Traits()
	for name, begin := range map[string]func() *connector.Leg{
		"prefill": func() *connector.Leg { return connector.NewPrefillLeg(s.Request, traits) },
		"decode":  func() *connector.Leg { return connector.NewLeg(s.Request) },
	} {
		plain, edited := begin(), begin()
		if name == "prefill" {
			require.NoError(t, http.Prefill(t.Context(), s, edited))
		} else {
			require.NoError(t, http.Decode(t.Context(), s, nil, edited))
		}
		want, err := plain.Body()
		require.NoError(t, err)
		got, err := edited.Body()
		require.NoError(t, err)
		assert.Equal(t, string(want), string(got), name)
	}
}

func BenchmarkLegs(b *testing.B) {
	http, err := plainhttp.New(nil)
	require.NoError(b, err)
	connectortest.BenchmarkLegs(b, measured(b, http))
}
