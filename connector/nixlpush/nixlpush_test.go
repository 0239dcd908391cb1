// SPDX-License-Identifier: Apache-2.0

package nixlpush_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/nixlpush"
	"github.com/pdkit/pdkit/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// attributes are those that the protocol requires.
func attributes() map[string]string {
	return map[string]string{"engineID": "pdkit-prefill", "sideChannelPort": "5600"}
}

// handoff is P's handoff for a session's request. P is the engine that its attribute names.
func handoff(s *connector.Session) string {
	engine := s.Prefill.Attribute("engineID")
	if engine == "" {
		engine = "pdkit-prefill"
	}
	return `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":` +
		string(connector.Quote(engine)) + `,` +
		`"remote_request_id":"cmpl-` + s.ID + `-0-8f6419b6","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,` +
		`"dcp_size":1,"pp_size":1,` +
		`"remote_num_tokens":60,"transfer_mode":"push","remote_prefill_cached_tokens":0}`
}

func harness(config string) connectortest.Harness {
	return connectortest.Harness{
		Name: nixlpush.Name, Config: json.RawMessage(config),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"dispatch":"sometimes"}`), json.RawMessage(`{"leaseDuration":"0s"}`),
			json.RawMessage(`{"leaseDuration":"-1s"}`),
		},
		Prefill: discovery.Endpoint{Attributes: attributes()},
		Response: func(s *connector.Session, _ []byte) connectortest.Response {
			return connectortest.Response{Handoff: handoff(s)}
		},
		Needs: []string{"do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id",
			"remote_host", "remote_port"},
		// how the gateway sends the legs; the engines do not mind
	}
}

func TestConformance(t *testing.T) {
	for name, config := range map[string]string{"together": `{"dispatch":"together","leaseDuration":"20s"}`,
		"serial": `{"dispatch":"serial","leaseDuration":"20s"}`} {
		t.Run(name, func(t *testing.T) { connectortest.Run(t, harness(config)) })
	}
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness(`{"leaseDuration":"20s"}`)) }

// The golden exchanges are recorded, with one X-Request-Id on both legs. What was not recorded follows the engine's
// source.
func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(nixlpush.Name), "testdata/golden")
}

const serial = `{"dispatch":"serial"}`

// A connector that combines others may run this one serially, although both legs could go out together.
func TestP_HandoffIsRelayedWhereThereIsOne(t *testing.T) {
	s := play.Session(t, connector.APICompletions, `{"prompt":"x"}`)
	leg := play.Decode(t, play.Open(t, nixlpush.Name, ``), s, play.Response(`{"kv_transfer_params":`+handoff(s)+`}`))
	assert.Equal(t, `{"prompt":"x","kv_transfer_params":`+handoff(s)+`}`, leg.Body,
		"to the byte, and without attributes")
}

// D reads tp_size without a default and dies if it is missing (vLLM 0.32.0, push_scheduler.py). The pull connector's D
// does not.
func TestAHandoffWithoutTPSizeIsNotRelayed(t *testing.T) {
	s := play.Session(t, connector.APICompletions, `{"prompt":"x"}`)
	for _, size := range []string{"", `"tp_size":null,`, `"tp_size":0,`, `"tp_size":"1",`, `"tp_size":1e400,`} {
		bad := play.Response(`{"kv_transfer_params":` + strings.Replace(handoff(s), `"tp_size":1,`, size, 1) + `}`)
		for _, settings := range []string{serial, ``} {
			_, err := play.TryDecode(play.Open(t, nixlpush.Name, settings), s, bad)
			require.ErrorIs(t, err, connector.ErrNoTransfer, size)
		}
	}
}

func TestSerialNeedsNoAttributes(t *testing.T) {
	c, s := play.Open(t, nixlpush.Name, serial), play.Session(t, connector.APICompletions, `{"prompt":"x"}`)
	play.Prefill(t, c, s)
	_, err := play.TryDecode(c, s, nil)
	require.ErrorIs(t, err, connector.ErrNoTransfer, "D would wait for ever")
}

func TestResponsesCannotNameARank(t *testing.T) {
	many := attributes()
	many["dpSize"] = "2"
	s := play.Session(t, connector.APIResponses, `{"input":"x"}`, many)
	var bad *connector.UnsupportedError
	_, err := play.TryPrefill(play.Open(t, nixlpush.Name, ``), s)
	require.ErrorAs(t, err, &bad)
	assert.Equal(t, "X-data-parallel-rank", bad.Member)
	play.Prefill(t, play.Open(t, nixlpush.Name, serial), s) // P's response names the rank that it chose
}

func TestEachAttemptHasAnIDOfItsOwn(t *testing.T) {
	c, seen := play.Open(t, nixlpush.Name, ``), map[string]bool{"": true, "client": true, "the-clients-id": true}
	for range 2 {
		s := play.Session(t, connector.APIChat, `{"messages":[],"request_id":"client"}`, attributes())
		p, d := play.Prefill(t, c, s), play.Decode(t, c, s, nil)
		require.Equal(t, p.Header, d.Header, "P finds D's registration by it")
		id := p.Header.Get("X-Request-Id")
		assert.False(t, seen[id], id)
		seen[id] = true
	}
}
