// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
)

var contextFirst = connectortest.Harness{
	Name:   "trtllm",
	Config: json.RawMessage(`{"dispatch":"context-first","machineID":7,"authKey":"k"}`),
	// TestAnswersWithoutAHandoffAreRefused tests what the handoff needs, since that depends on its other members.
	Response: func(_ *connector.Session, prefill []byte) connectortest.Response {
		id := gjson.GetBytes(prefill, "disaggregated_params.disagg_request_id").Raw
		return connectortest.Response{
			Body: []byte(`{"id":"x","prompt_token_ids":[1,15043],"usage":{"prompt_tokens":2},"choices":[{"index":0,` +
				`"finish_reason":"length"}]}`),
			Handoff: `{"request_type":"context_only","first_gen_tokens":[278],"ctx_request_id":` + id +
				`,"disagg_request_id":` + id +
				`,"encoded_opaque_state":"b64","draft_tokens":[7],"ctx_dp_rank":0,"ctx_info_endpoint":"tcp://c:5000"}`,
		}
	},
	Except: connectortest.Exceptions{
		// P makes one token, which is the last if the limit is one
		KeepsLimit:    true,
		KeepsLogprobs: true,                                   // P gives D the first token's log probabilities
		Rewrites:      []string{"prompt_token_ids", "prompt"}, // D gets P's token ids
	},
}

func generationFirst() connectortest.Harness {
	h := contextFirst
	h.Config = json.RawMessage(`{"dispatch":"generation-first","machineID":7,"authKey":"k"}`)
	h.Response, h.Except.Rewrites = nil, nil
	h.Call = func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK,
				Body: io.NopCloser(
					strings.NewReader(`{"disaggregated_params":{"ctx_info_endpoint":["tcp://c:5000"],` +
						`"encoded_opaque_state":"b64"}}`),
				)},
			nil
	}
	return h
}

func TestConformance(t *testing.T) {
	t.Run("context first", func(t *testing.T) { connectortest.Run(t, contextFirst) })
	t.Run("generation first", func(t *testing.T) { connectortest.Run(t, generationFirst()) })
}

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open("trtllm"), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, contextFirst) }
