// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise_test

import (
	"encoding/json"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/ascendlayerwise"
	"github.com/pdkit/pdkit/connector/connectortest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// callback is the body that D posts for a request id.
func callback(id string) string {
	return `{"token_ids":[],"request_id":"` + id + `","do_remote_prefill":false,"do_remote_decode":true,` +
		`"remote_block_ids":[[11,12]],"remote_block_size":[128],"remote_engine_id":"d0","remote_host":"10.0.0.6",` +
		`"remote_port":30100,"remote_tp_size":8,"remote_pcp_size":1,"remote_dcp_size":1,"remote_cached_tokens":0}`
}

// engineID is the id that D's engine gives a request, without its random suffix.
func engineID(api connector.API, id string) string {
	return map[connector.API]string{
		connector.APICompletions: "cmpl-" + id + "-0", connector.APIChat: "chatcmpl-" + id,
		connector.APIMessages:  "chatcmpl-" + id,
		connector.APIResponses: id + "_0", connector.APIGenerate: "generate-tokens-" + id,
	}[api]
}

func harness() connectortest.Harness {
	return connectortest.Harness{
		Name: ascendlayerwise.Name,
		Config: json.RawMessage(`{"callbackListen":"127.0.0.1:0","callbackURL":"http://gateway.example:8600",` +
			`"kvPort":36000}`),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"callbackListen":"nowhere"}`), json.RawMessage(`{"callbackListen":"127.0.0.1:65536"}`),
			json.RawMessage(`{"callbackListen":":8600"}`),
			json.RawMessage(`{"callbackListen":"0.0.0.0:8600"}`), json.RawMessage(`{"callbackListen":"[::]:8600"}`),
			json.RawMessage(`{"callbackURL":"gateway:8600"}`), json.RawMessage(`{"callbackURL":"ftp://gateway"}`),
			json.RawMessage(`{"callbackURL":"http://user:word@gateway"}`),
			json.RawMessage(`{"callbackURL":"http://gateway/?a=b"}`),
			json.RawMessage(`{"callbackURL":"http://0.0.0.0:8600"}`),
			json.RawMessage(`{"callbackURL":"http://gateway:0"}`),
			json.RawMessage(`{"kvPort":65536}`),
		},
		Event: func(s *connector.Session) connector.Event {
			return connector.Event{Body: []byte(callback(engineID(s.API, s.ID))), At: time.Now()}
		},
	}
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness()) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(ascendlayerwise.Name), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness()) }
