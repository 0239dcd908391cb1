// SPDX-License-Identifier: Apache-2.0

package mooncakeascend_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/sjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/mooncakeascend"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// good is a handoff with the keys that request_finished writes, in its order.
const good = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7,8,9]],` +
	`"remote_engine_id":"e3e6","remote_request_id":"cmpl-r-0-1a2b3c4d","remote_host":"10.0.0.5","remote_port":30000,` +
	`"remote_pcp_size":1,"remote_dcp_size":1,"remote_ptp_size":8,"last_token_id":1234,` +
	`"remote_multi_nodes_meta_mapping":{"0":{"host":"10.0.0.5","engine_id":"e3e6","handshake_port":30000}},` +
	`"num_prompt_blocks":3,"remote_block_size":128}`

// hybridHandoff has the keys that MooncakeHybridConnector writes, in its order: one group keeps no block.
const hybridHandoff = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7,8,9],[]],` +
	`"remote_engine_id":"e3e6","remote_request_id":"cmpl-r-0-1a2b3c4d","remote_host":"10.0.0.5","remote_port":30000,` +
	`"remote_ptp_size":8,"last_token_id":1234,"remote_multi_nodes_meta_mapping":{},"num_prompt_blocks":3}`

func harness() connectortest.Harness {
	return connectortest.Harness{
		Name:   mooncakeascend.Name,
		Config: json.RawMessage(`{"leaseDuration":"90s","kvPort":36000}`),
		BadConfig: []json.RawMessage{
			json.RawMessage(`{"leaseDuration":"0s"}`), json.RawMessage(`{"leaseDuration":"1500ms"}`),
			json.RawMessage(`{"kvPort":65536}`), json.RawMessage(`{"kvPort":-1}`),
		},
		Response: func(*connector.Session, []byte) connectortest.Response {
			return connectortest.Response{Handoff: good}
		},
		Needs: []string{
			"do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_host", "remote_port",
			"remote_block_ids", "num_prompt_blocks",
		},
	}
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness()) }

func TestConformanceOfHybrid(t *testing.T) {
	h := harness()
	h.Name = mooncakeascend.HybridName
	h.Response = func(*connector.Session, []byte) connectortest.Response {
		return connectortest.Response{Handoff: hybridHandoff}
	}
	connectortest.Run(t, h)
}

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(mooncakeascend.Name), "testdata/golden")
	connectortest.Golden(t, connectortest.Open(mooncakeascend.HybridName), "testdata/mooncake-hybrid")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness()) }

func TestHandoffIsRelayedByteForByte(t *testing.T) {
	with := func(path, raw string) string {
		out, err := sjson.SetRaw(good, path, raw)
		require.NoError(t, err)
		return out
	}
	for rule, h := range map[string]string{
		"as request_finished makes it":          good,
		"several groups, one of them empty":     with("remote_block_ids", `[[1,2],[],[3]]`),
		"unknown keys, big numbers":             with("new", `[123456789012345678901234567890,{"a":null}]`),
		"sizes of null, where D has a default":  with("remote_ptp_size", `null`),
		"a block size of null":                  with("remote_block_size", `null`),
		"white space":                           strings.ReplaceAll(good, ",", " ,\n"),
		"an address that only the engines know": with("remote_host", `"fe80::1%eth0"`),
	} {
		got := play.Decode(t, play.Open(t, mooncakeascend.Name, ``),
			play.Session(t, connector.APICompletions, `{"prompt":"x"}`), play.Response(`{"kv_transfer_params":`+h+`}`))
		assert.Equal(t, `{"prompt":"x","kv_transfer_params":`+h+`}`, got.Body, rule)
	}
}

// D has a default for these if they are absent, and calculates with None if they are null.
func TestWhatMayBeAbsentIsAbsentIfItIsNull(t *testing.T) {
	null := good
	want := good
	for _, key := range []string{"remote_pcp_size", "remote_dcp_size", "remote_multi_nodes_meta_mapping"} {
		var err error
		null, err = sjson.SetRaw(null, key, "null")
		require.NoError(t, err)
		want, err = sjson.Delete(want, key)
		require.NoError(t, err)
	}
	got := play.Decode(t, play.Open(t, mooncakeascend.Name, ``),
		play.Session(t, connector.APICompletions, `{"prompt":"x"}`), play.Response(`{"kv_transfer_params":`+null+`}`))
	assert.Equal(t, `{"prompt":"x","kv_transfer_params":`+want+`}`, got.Body)
}

func TestHandoffsThatDWouldDieOfOrHangOnAreRefused(t *testing.T) {
	c, s := play.Open(t, mooncakeascend.Name, ``), play.Session(t, connector.APIChat, `{"messages":[]}`)
	play.Spoilt(t, good, map[string][]string{
		"do_remote_prefill": {"-", "null", "false", `"true"`},
		"do_remote_decode":  {"true"},
		"remote_engine_id":  {"-", "null", `""`, "4321"},
		"remote_request_id": {"-", "null", `""`},
		"remote_host":       {"-", "null", `""`, `["4321"]`},
		"remote_port":       {"-", "null", `"4321"`, "0", "65536"},
		"remote_block_ids": {"-", "null", "[]", "[[]]", "[4321]", `[["4321"]]`, "[[4321.5]]",
			"[[-4321]]", "{}"},
		"num_prompt_blocks":               {"-", "null", "0", `"4321"`, "-4321"},
		"remote_pcp_size":                 {"0", `"4321"`},
		"remote_dcp_size":                 {"0"},
		"remote_ptp_size":                 {"0", `"4321"`},
		"remote_block_size":               {"0", `"4321"`, "[4321]"},
		"remote_multi_nodes_meta_mapping": {"[]", `"4321"`},
	}, func(bad string) error {
		_, err := play.TryDecode(c, s, play.Response(`{"kv_transfer_params":`+bad+`}`))
		return err
	}, "10.0.0.5")
}
