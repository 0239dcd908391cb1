// SPDX-License-Identifier: Apache-2.0

package connectortest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

// A connector's own test runs the suite; here it is the connector "http".
func ExampleRun() {
	test := func(t *testing.T) {
		connectortest.Run(t, connectortest.Harness{
			Name:   plainhttp.Name,
			Config: json.RawMessage(`{"maxRetries":3}`),
		})
	}
	_ = test // func TestConformance(t *testing.T)
	// Output:
}

// stubborn is "http", but for a stream that it asks P for.
type stubborn struct{ connector.KVConnector }

func (s stubborn) Prefill(ctx context.Context, session *connector.Session, leg *connector.Leg) error {
	err := s.KVConnector.Prefill(ctx, session, leg)
	leg.Set("stream", json.RawMessage("true"))
	return err
}

// Check is for programs: what is wrong is in the error.
func ExampleCheck() {
	err := connectortest.Check(context.Background(), connectortest.Harness{
		New: func(settings json.RawMessage) (connector.KVConnector, error) {
			c, err := connectortest.Open(plainhttp.Name)(settings)
			return stubborn{c}, err
		},
	})
	for line := range strings.SplitSeq(err.Error(), "\n") {
		fmt.Println(line)
	}
	// Output:
	// prefill asks for one whole response without log probabilities: chat, plain: the prefill leg asks for a stream
}
