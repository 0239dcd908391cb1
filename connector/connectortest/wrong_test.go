// SPDX-License-Identifier: Apache-2.0

package connectortest_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/connectortest/testdata/wrong"
	"github.com/pdkit/pdkit/discovery"
)

// toy is the harness of the connector that is right, and of all that are wrong in one thing.
var toy = connectortest.Harness{
	Name:      wrong.Name,
	New:       func(settings json.RawMessage) (connector.KVConnector, error) { return wrong.New(settings) },
	Config:    json.RawMessage(`{"blockSize":32,"pollInterval":"50ms","link":{"speed":100,"device":"eth7"}}`),
	BadConfig: []json.RawMessage{json.RawMessage(`{"blockSize":-1}`)},
	Prefill:   discovery.Endpoint{Attributes: map[string]string{"kvPort": "9000", "store": "a, b"}},
	Decode:    discovery.Endpoint{Attributes: map[string]string{"zone": "a", "store": "b"}},
	Response: func(s *connector.Session, _ []byte) connectortest.Response {
		return connectortest.Response{Handoff: `{"remote_blocks":[1,2],"remote_size":2,"remote_token":"` + s.ID + `"}`}
	},
	Needs: []string{"remote_blocks", "remote_token"},
	Call: func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, Request: r,
			Body: io.NopCloser(strings.NewReader(`{"engine_id":"engine-7f"}`))}, nil
	},
	Event:   func(*connector.Session) connector.Event { return connector.Event{Body: []byte(`{"ready":true}`)} },
	Timeout: 20 * time.Second,
}

func TestARightConnectorBreaksNoRule(t *testing.T) {
	require.NoError(t, connectortest.Check(t.Context(), toy)) // Run is in each connector's test
}

func TestEachRuleFailsForAWrongConnector(t *testing.T) {
	defer wrong.Wait()
	broken := map[string]bool{}
	for _, f := range wrong.Faults() {
		t.Run(f.What, func(t *testing.T) {
			h := toy
			h.Timeout = 500 * time.Millisecond // well before a fault that takes its time is over
			if h.New = f.New; f.Bare {
				h.Response, h.Needs = nil, nil
			}
			if err := connectortest.CheckRule(t.Context(), h, f.Breaks); assert.Error(t, err,
				"it %s, and keeps the rule: %s",
				f.What, f.Breaks) {
				t.Log(err)
				broken[f.Breaks] = true
			}
		})
	}
	for _, name := range connectortest.Rules() {
		assert.True(t, broken[name], "no wrong connector breaks the rule: %s", name)
	}
}

// tickets is the harness of connectors whose handoff is a header.
func tickets(c wrong.Ticket) connectortest.Harness {
	return connectortest.Harness{
		New: func(settings json.RawMessage) (connector.KVConnector, error) {
			return c, config.Decode(settings, &struct{}{})
		},
		Response: func(s *connector.Session, _ []byte) connectortest.Response {
			return connectortest.Response{Handoff: "ticket-" + s.ID}
		},
	}
}

func TestAHandoffInAHeader(t *testing.T) {
	connectortest.Run(t, tickets(wrong.NewTicket()))
	for what, c := range wrong.Tickets() {
		err := connectortest.Check(t.Context(), tickets(c))
		assert.ErrorContains(t, err, "a response in which the header X-KV-Ticket "+what+" became a decode leg")
	}
}
