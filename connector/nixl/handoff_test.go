// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/internal/contract"
)

const good = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[13,14]],` +
	`"remote_engine_id":"e3e6","remote_request_id":"cmpl-1","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,` +
	`"dcp_size":1,"pp_size":1,"remote_num_tokens":60,"remote_blocks_expiry_time":null,"transfer_mode":"pull",` +
	`"remote_prefill_cached_tokens":0}`

func TestHandoffIsRelayedByteForByte(t *testing.T) {
	with := func(path, raw string) string {
		out, err := sjson.SetRaw(good, path, raw)
		require.NoError(t, err)
		return out
	}
	for rule, handoff := range map[string]string{
		"as vLLM 0.32.0 sends it":          good,
		"unknown keys of any shape":        with("new", `{"a":[null,{"b":"c"}],"":1e-7}`),
		"integers beyond 2^53":             with("new", `123456789012345678901234567890`),
		"block ids beyond 2^53":            with("remote_block_ids", `[[9007199254740993,9223372036854775807]]`),
		"several groups, an empty one too": with("remote_block_ids", `[[1,2],[],[3]]`),
		"white space": "{\n  \"do_remote_prefill\" : true ,\t\"remote_block_ids\" : [ [ 1 , 2 ] " +
			",\r\n [ 3 ] ] , " +
			"\"remote_engine_id\":\"e\",\"remote_request_id\":\"r\",\"remote_host\":\"h\",\"remote_port\" : 1 }",
		"escapes":                       with("remote_request_id", `"\u0063mpl-\/1\ud83d\ude00"`),
		"escaped names":                 strings.Replace(good, "remote_host", `remote\u005fhost`, 1),
		"numbers in their own spelling": with("remote_blocks_expiry_time", `1.50e+03`),
		"another order": `{"remote_port":65535,"remote_host":"::1","remote_request_id":"r",` +
			`"remote_engine_id":"e_dp3","remote_block_ids":[[0]],"do_remote_prefill":true}`,
		"counts of null, where D asks": with("remote_num_tokens", `null`),
	} {
		t.Run(rule, func(t *testing.T) {
			s := play.Session(t, connector.APICompletions, `{"prompt":"x"}`)
			decode := play.Decode(t, play.Open(t, nixl.Name, ``), s,
				play.Response("{ \"id\":1,\n\"kv_transfer_params\" :  "+handoff+"  }"))
			assert.Equal(t, `{"prompt":"x","kv_transfer_params":`+handoff+`}`, decode.Body)
		})
	}
}

// None of these handoffs may reach D.
func TestMalformedHandoffIsRefused(t *testing.T) {
	c, s := play.Open(t, nixl.Name, ``), play.Session(t, connector.APIChat, `{"messages":[]}`)
	play.Spoilt(t, good, map[string][]string{
		"do_remote_prefill": {"-", "null", "false", `"true"`, "1", "0"},
		"remote_engine_id":  {"-", "null", `""`, "1234567", "{}", `["4321"]`, `"\ud800"`},
		"remote_request_id": {"-", "null", `""`, "1234567", "true"},
		"remote_host":       {"-", "null", `""`, "1234567", `["10.9.8.7"]`},
		"remote_port":       {"-", "null", `"5678"`, "0", "-5678", "65536", "5678.5", "5.678e3", "[5678]", "true"},
		"remote_block_ids": {
			"-", "null", "[]", "[[]]", "[[],[]]", "[4321,4322]", "[[4321],4322]", "[4321,[4322]]", `"4321"`, "{}",
			`[["4321"]]`, "[[4321,null]]",
			"[[-4321]]", "[[4321.5]]", "[[[4321]]]", "[{}]", "[[{}]]", "[[9223372036854775808]]", "[null]", "[true]",
		},
		"tp_size":                      {`"4321"`, "0", "-4321", "1.5", "{}"},
		"dcp_size":                     {`"4321"`, "0"},
		"pp_size":                      {`"4321"`, "0"},
		"remote_num_tokens":            {`"4321"`, "-4321", "1.5"},
		"remote_prefill_cached_tokens": {`"4321"`, "-4321"},
		"remote_blocks_expiry_time":    {`"4321"`, "true", "[4321]"},
	}, func(bad string) error {
		_, err := play.TryDecode(c, s, play.Response(`{"kv_transfer_params":`+bad+`}`))
		return err
	}, "5678", "1234567", "65536", "10.9.8.7", "cmpl-1", "e3e6", "127.0.0.1", "5600")
}

func TestARefusedHandoffLeavesTheLegAsItWas(t *testing.T) {
	s := play.Session(t, connector.APIChat, `{"messages":[]}`)
	l := contract.NewLeg(s.Request)
	p := play.Response(`{"kv_transfer_params":{"do_remote_prefill":true}}`)
	require.ErrorIs(t, play.Open(t, nixl.Name, ``).Decode(t.Context(), s, p, l), connector.ErrNoTransfer)
	leg, err := play.Read(l)
	require.NoError(t, err)
	assert.Equal(t, `{"messages":[]}`, leg.Body, "decode alone may still send it, under fallback: decode")
}

// D has a default for a size that is absent, and its engine ends at one that is null.
func TestASizeOfNullIsAbsent(t *testing.T) {
	for _, key := range []string{"tp_size", "dcp_size", "pp_size"} {
		null, err := sjson.SetRaw(good, key, "null")
		require.NoError(t, err)
		want, err := sjson.Delete(null, key)
		require.NoError(t, err)
		got := play.Decode(t, play.Open(t, nixl.Name, ``), play.Session(t, connector.APICompletions, `{"prompt":"x"}`),
			play.Response(`{"kv_transfer_params":`+null+`}`))
		assert.Equal(t, `{"prompt":"x","kv_transfer_params":`+want+`}`, got.Body)
	}
}
