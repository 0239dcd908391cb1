// SPDX-License-Identifier: Apache-2.0

package moriio_test

import (
	"encoding/json"
	"testing"

	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/moriio"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// handoff is the kv_transfer_params in P's response to a session.
func handoff(s *connector.Session) string {
	return `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[7,8,9],` +
		`"remote_engine_id":"10.0.0.5:6301","remote_host":"10.0.0.5","remote_handshake_port":6301,` +
		`"remote_notify_port":61005,"remote_dp_rank":0,"remote_dp_rank_override":true,"remote_dp_size":1,` +
		`"remote_dp_size_local":1,"tp_size":8,"transfer_id":"tx-` + s.UUID() + `"}`
}

// modes are the settings that choose a mode. Write is the default.
var modes = map[string]string{moriio.ModeRead: `"mode":"read",`}

func harness(mode string) connectortest.Harness {
	h := connectortest.Harness{
		Name: moriio.Name,
		Config: json.RawMessage(`{` + modes[mode] + `"handshakePort":7301,"notifyPort":62005,"tpSize":4,` +
			`"deferTimeout":"90s"}`),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"mode":"both"}`), json.RawMessage(`{"handshakePort":65536}`),
			json.RawMessage(`{"notifyPort":-1}`), json.RawMessage(`{"tpSize":-1}`),
			json.RawMessage(`{"dpSize":100000}`), json.RawMessage(`{"deferTimeout":"0s"}`),
		},
		Response: func(s *connector.Session, _ []byte) connectortest.Response {
			return connectortest.Response{Handoff: handoff(s)}
		},
		Needs: []string{"do_remote_prefill", "transfer_id"},
		Except: connectortest.Exceptions{
			// engines cut host:::1,… at commas, and each part at its first colon
			BareIPv6:  true,
			OwnValues: map[string]string{"mode": mode}, // the rules refuse two engines of the other mode
		},
	}
	if mode == moriio.ModeRead {
		h.Needs = append(h.Needs, "remote_engine_id", "remote_block_ids")
	}
	return h
}

func TestConformance(t *testing.T) {
	for _, mode := range []string{moriio.ModeWrite, moriio.ModeRead} {
		t.Run(mode, func(t *testing.T) { connectortest.Run(t, harness(mode)) })
	}
}

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(moriio.Name), "testdata/golden")
}

func FuzzRead(f *testing.F) { connectortest.Fuzz(f, harness(moriio.ModeRead)) }
