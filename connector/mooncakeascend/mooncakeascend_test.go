// SPDX-License-Identifier: Apache-2.0

package mooncakeascend_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/uncarried"
	"github.com/pdkit/pdkit/connector/mooncakeascend"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/request"
)

// good is a handoff with the keys that request_finished writes, in its order.
const good = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7,8,9]],` +
	`"remote_engine_id":"e3e6","remote_request_id":"cmpl-r-0-1a2b3c4d","remote_host":"10.0.0.5","remote_port":30000,` +
	`"remote_pcp_size":1,"remote_dcp_size":1,"remote_ptp_size":8,"last_token_id":1234,` +
	`"remote_multi_nodes_meta_mapping":{"0":{"host":"10.0.0.5","engine_id":"e3e6","handshake_port":30000}},` +
	`"num_prompt_blocks":3,"remote_block_size":128}`

func open(t testing.TB, o *mooncakeascend.Options) *mooncakeascend.Connector {
	t.Helper()
	c, err := mooncakeascend.New(o)
	require.NoError(t, err)
	return c
}

func session(t testing.TB, api connector.API, body string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return contract.NewSession(r, "id", discovery.Endpoint{}, discovery.Endpoint{})
}

func decode(c connector.KVConnector, s *connector.Session, body string) (string, error) {
	l := contract.NewLeg(s.Request)
	if err := c.Decode(
		context.Background(), s, &connector.PrefillResult{Status: http.StatusOK, Body: []byte(body)}, l,
	); err != nil {
		return "", err
	}
	leg, err := contract.Body(l)
	return string(leg), err
}

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
		got, err := decode(open(t, nil), session(t, connector.APICompletions, `{"prompt":"x"}`),
			`{"kv_transfer_params":`+h+`}`)
		require.NoError(t, err, rule)
		assert.Equal(t, `{"prompt":"x","kv_transfer_params":`+h+`}`, got, rule)
	}
}

// Each case replaces one key; "-" removes it. The error names the key and holds no value.
func TestHandoffsThatDWouldDieOfOrHangOnAreRefused(t *testing.T) {
	for key, values := range map[string][]string{
		"do_remote_prefill": {"-", "null", "false", `"true"`},
		"do_remote_decode":  {"true"},
		"remote_engine_id":  {"-", "null", `""`, "4321"},
		"remote_request_id": {"-", "null", `""`},
		"remote_host":       {"-", "null", `""`, `["4321"]`},
		"remote_port":       {"-", "null", `"4321"`, "0", "65536"},
		"remote_block_ids": {"-", "null", "[]", "[[]]", "[4321]", `[["4321"]]`, "[[4321.5]]",
			"[[-4321]]", "{}"},
		"num_prompt_blocks":               {"-", "null", "0", `"4321"`, "-4321"},
		"remote_pcp_size":                 {"null", "0", `"4321"`},
		"remote_dcp_size":                 {"null", "0"},
		"remote_ptp_size":                 {"0", `"4321"`},
		"remote_block_size":               {"0", `"4321"`, "[4321]"},
		"remote_multi_nodes_meta_mapping": {"null", "[]", `"4321"`},
	} {
		for _, v := range values {
			bad, err := sjson.Delete(good, key)
			if v != "-" {
				bad, err = sjson.SetRaw(good, key, v)
			}
			require.NoError(t, err)
			_, err = decode(open(t, nil), session(t, connector.APIChat, `{"messages":[]}`), `{"kv_transfer_params":`+
				bad+`}`)
			require.ErrorIs(t, err, connector.ErrNoTransfer, "%s=%s", key, v)
			assert.Contains(t, err.Error(), key)
			assert.NotContains(t, err.Error(), "4321")
			assert.NotContains(t, err.Error(), "10.0.0.5")
		}
	}
}

// P answers without a handoff if it did not end by length.
func TestAResponseWithoutAHandoffIsRefused(t *testing.T) {
	for _, body := range []string{``, `[]`, `{}`, `{"kv_transfer_params":null}`, `{"kv_transfer_params":[]}`,
		`{"kv_transfer_params":{}}`, `{"kv_transfer_params":` + good} {
		_, err := decode(open(t, nil), session(t, connector.APIChat, `{"messages":[]}`), body)
		require.ErrorIs(t, err, connector.ErrNoTransfer, body)
	}
	err := open(t, nil).Decode(context.Background(), session(t, connector.APIChat, `{}`), nil, nil)
	require.ErrorIs(t, err, connector.ErrNoTransfer)
}

func TestBothLegsCarryTheSessionsID(t *testing.T) {
	c, s := open(t, nil), session(t, connector.APIResponses, `{"input":"x"}`)
	p, d := contract.NewPrefillLeg(s.Request, c.Traits()), contract.NewLeg(s.Request)
	require.NoError(t, c.Prefill(context.Background(), s, p))
	require.NoError(
		t, c.Decode(context.Background(), s, &connector.PrefillResult{Status: 200,
			Body: []byte(`{"kv_transfer_params":` + good +
				`}`)}, d),
	)
	for _, leg := range []*connector.Leg{p, d} {
		assert.Equal(t, []request.Header{{Name: "X-Request-Id", Value: s.ID}}, contract.Leg(leg).Headers)
		id, _ := leg.Current("request_id")
		assert.Equal(t, `"`+s.ID+`"`, string(id), "/v1/responses ignores the header")
	}
}

func TestSettings(t *testing.T) {
	assert.Equal(t, 480*time.Second, open(t, nil).Traits().Handoff.Lease, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT")
	var zero mooncakeascend.Connector
	assert.Equal(t, 480*time.Second, zero.Traits().Handoff.Lease)
	c, err := connector.Open(
		config.Spec{Type: "MooncakeConnectorV1", Config: json.RawMessage(`{"leaseDuration":"90s"}`)},
	)
	require.NoError(t, err)
	assert.Equal(t, mooncakeascend.Name, c.Traits().Name)
	assert.Equal(t, 90*time.Second, c.Traits().Handoff.Lease)
	assert.Equal(t, "n", uncarried.Member(open(t, nil), session(t, connector.APIChat, `{"n":2}`).Request),
		"the handoff is read once")
	assert.Equal(
		t, connector.ParamsMember, uncarried.Member(open(t, nil),
			session(t, connector.APISGLang, `{"text":"a"}`).Request),
	)
}

// MooncakeHybridConnector is the same protocol under another class, for engines with equal block sizes.
func TestHybridIsItsOwnClass(t *testing.T) {
	c, err := connector.Open(config.Spec{Type: "MooncakeHybridConnector"})
	require.NoError(t, err)
	assert.Equal(t, mooncakeascend.HybridName, c.Traits().Name)
	assert.Equal(t, 480*time.Second, c.Traits().Handoff.Lease)
}

func endpoint(t testing.TB, rawURL string, role discovery.Role, attributes map[string]string) discovery.Endpoint {
	t.Helper()
	u, err := url.Parse(rawURL)
	require.NoError(t, err)
	return discovery.Endpoint{ID: rawURL, URL: u, Role: role, Attributes: attributes}
}

func TestFaultyAttributesAreNamed(t *testing.T) {
	for _, name := range []string{"tpSize", "dpSize", "kvPort"} {
		faults := config.FieldErrors(
			open(t, nil).CheckEndpoint(endpoint(t, "http://d:1", discovery.RoleDecode, map[string]string{name: "0"})),
		)
		require.Len(t, faults, 1)
		assert.Equal(t, "attributes."+name, faults[0].Path)
	}
	require.NoError(t, open(t, nil).CheckEndpoint(
		endpoint(t, "http://10.0.0.5:8100", discovery.RolePrefill, map[string]string{"tpSize": "4"}),
	))
}
