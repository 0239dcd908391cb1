// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
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
			s := session(t, connector.APICompletions, `{"prompt":"x"}`)
			decode, err := decodeLeg(open(t, nil), s, "{ \"id\":1,\n\"kv_transfer_params\" :  "+handoff+"  }")
			require.NoError(t, err)
			assert.Equal(t, `{"prompt":"x","kv_transfer_params":`+handoff+`}`, decode)
		})
	}
}

// Each case replaces one key of a good handoff; "-" removes the key. None of them may reach D. The error names the key
// and holds no value.
func TestMalformedHandoffIsRefused(t *testing.T) {
	for key, values := range map[string][]string{
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
		"tp_size":                      {`"4321"`, "0", "-4321", "1.5", "null", "{}"},
		"dcp_size":                     {`"4321"`, "0", "null"},
		"pp_size":                      {`"4321"`, "0", "null"},
		"remote_num_tokens":            {`"4321"`, "-4321", "1.5"},
		"remote_prefill_cached_tokens": {`"4321"`, "-4321"},
		"remote_blocks_expiry_time":    {`"4321"`, "true", "[4321]"},
	} {
		for _, value := range values {
			t.Run(key+"="+value, func(t *testing.T) {
				bad, err := sjson.Delete(good, key)
				if value != "-" {
					bad, err = sjson.SetRaw(good, key, value)
				}
				require.NoError(t, err)
				s := session(t, connector.APIChat, `{"messages":[]}`)
				_, err = decodeLeg(open(t, nil), s, `{"kv_transfer_params":`+bad+`}`)
				require.ErrorIs(t, err, connector.ErrNoTransfer)
				assert.Contains(t, err.Error(), key)
				requireNoValue(t, err, []byte(bad))
				for _, v := range []string{"4321", "5678", "10.9.8.7", "cmpl-1", "e3e6", "127.0.0.1"} {
					assert.NotContains(t, err.Error(), v)
				}
			})
		}
	}
}

func TestResponseWithoutAHandoffIsRefused(t *testing.T) {
	for rule, response := range map[string]string{
		"no body":                            ``,
		"not JSON":                           `<html>4321</html>`,
		"not one object":                     `[` + good + `]`,
		"a stream":                           "data: {}\n\n",
		"cut":                                `{"kv_transfer_params":` + good,
		"trailing bytes":                     `{"kv_transfer_params":` + good + `}4321`,
		"absent":                             `{"id":"4321"}`,
		"null":                               `{"kv_transfer_params":null}`,
		"empty":                              `{"kv_transfer_params":{}}`,
		"a string":                           `{"kv_transfer_params":"4321"}`,
		"an array":                           `{"kv_transfer_params":[4321]}`,
		"a number":                           `{"kv_transfer_params":4321}`,
		"only nested, where nobody reads it": `{"choices":[{"kv_transfer_params":` + good + `}]}`,
		"twice": `{"kv_transfer_params":` + good + `,"kv_transfer_params":` + good +
			`}`,
		"another key twice in the response": `{"id":1,"id":2,"kv_transfer_params":` + good + `}`,
		"a key twice in the handoff": `{"kv_transfer_params":` +
			strings.Replace(good, `{`, `{"remote_port":4321,`, 1) + `}`,
		"a key twice by escape": `{"kv_transfer_params":` +
			strings.Replace(good, `{`, `{"remote\u005fport":4321,`, 1) + `}`,
		"nested garbage under an unknown key": `{"kv_transfer_params":` +
			strings.Replace(good, `{`, `{"new":[4321,,],`, 1) + `}`,
		"nested garbage among the block ids": `{"kv_transfer_params":` +
			strings.Replace(good, `[[13,14]]`, `[[13,,14]]`, 1) + `}`,
		"a string that is not UTF-8": `{"kv_transfer_params":` +
			strings.Replace(good, `{`, "{\"new\":\"\xff\",", 1) + `}`,
		"a nested string that is not UTF-8": `{"kv_transfer_params":` +
			strings.Replace(good, `{`, "{\"new\":[\"\xff\"],", 1) + `}`,
		"a number that JSON does not know (NaN)": `{"kv_transfer_params":` + strings.Replace(good, `:60`, `:NaN`, 1) +
			`}`,
		"a nested number that JSON does not know": `{"kv_transfer_params":` +
			strings.Replace(good, `{`, `{"new":[Infinity],`, 1) + `}`,
	} {
		t.Run(rule, func(t *testing.T) {
			_, err := decodeLeg(open(t, nil), session(t, connector.APIChat, `{"messages":[]}`), response)
			require.ErrorIs(t, err, connector.ErrNoTransfer)
			assert.NotContains(t, err.Error(), "4321")
		})
	}
}

func TestDecodeBeforePrefillIsRefused(t *testing.T) {
	s := session(t, connector.APIChat, `{"messages":[]}`)
	err := open(t, nil).Decode(context.Background(), s, nil, contract.NewLeg(s.Request))
	require.ErrorIs(t, err, connector.ErrNoTransfer)
}

func TestARefusedHandoffLeavesTheLegAsItWas(t *testing.T) {
	s := session(t, connector.APIChat, `{"messages":[]}`)
	l := contract.NewLeg(s.Request)
	p := &connector.PrefillResult{Status: 200, Body: []byte(`{"kv_transfer_params":{"do_remote_prefill":true}}`),
		At: s.CreatedAt}
	require.ErrorIs(t, open(t, nil).Decode(context.Background(), s, p, l), connector.ErrNoTransfer)
	body, err := contract.Body(l)
	require.NoError(t, err)
	assert.Equal(t, `{"messages":[]}`, string(body), "decode alone may still send it, under fallback: decode")
}
