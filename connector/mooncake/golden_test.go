// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/mooncake"
	"github.com/pdkit/pdkit/discovery"
)

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(mooncake.Name), "testdata/golden")
}

func harness() connectortest.Harness {
	return connectortest.Harness{
		Name: mooncake.Name,
		Config: json.RawMessage(`{"bootstrapPort":9998,"engineTTL":"7s","abortTimeout":"60s","num_workers":4,` +
			`"mooncake_protocol":"tcp","device_name":"mlx5_0",` +
			`"bootstrap_server_address":"10.0.0.9:8999","prefill_side_swa_replay":true}`),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"bootstrapPort":65536}`), json.RawMessage(`{"engineTTL":30}`),
			json.RawMessage(`{"abortTimeout":"500ms"}`), json.RawMessage(`{"dispatch":"both"}`),
			json.RawMessage(`{"num_workers":-1}`), json.RawMessage(`{"bootstrap_server_address":"http://h:1"}`),
			json.RawMessage(`{"bootstrap_server_address":"h:0"}`),
		},
		Prefill: discovery.Endpoint{
			Attributes: map[string]string{"bootstrapURL": "http://planted-prefill.example:8998"},
		},
		// Decode takes nothing from P's response, but the response must say that P ended by length, in the member that
		// each API has.
		BadResponses: bodies(``, `{}`, `[]`, `{"choices":[]}`,
			`{"choices":null,"stop_reason":null,"incomplete_details":null}`,
			`{"choices":[{"finish_reason":"stop"}],"stop_reason":"end_turn","status":"completed",`+
				`"incomplete_details":{"reason":"content_filter"}}`,
			`{"choices":[{"finish_reason":1}],"stop_reason":1,"incomplete_details":{"reason":1}}`,
			`{"choices":[{"finish_reason":"length"},{"finish_reason":"length"}],"stop_reason":"length",`+
				`"incomplete_details":{"reason":"length"}}`),
		Call: func(*http.Request) (*http.Response, error) {
			return respond(http.StatusOK, `{"0":{"engine_id":"engine-id-0",`+
				`"worker_addr":{"0":{"0":"tcp://10.0.0.1:1"}}}}`), nil
		},
	}
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness()) }

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness()) }

func bodies(list ...string) (responses []connectortest.Response) {
	for _, body := range list {
		responses = append(responses, connectortest.Response{Body: []byte(body)})
	}
	return responses
}
