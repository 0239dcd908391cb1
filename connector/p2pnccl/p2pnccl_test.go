// SPDX-License-Identifier: Apache-2.0

package p2pnccl_test

import (
	"context"
	"encoding/json"
	"net/url"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/internal/uncarried"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, settings string) connector.KVConnector {
	t.Helper()
	c, err := connector.Open(config.Spec{Type: "P2pNcclConnector", Config: json.RawMessage(settings)})
	require.NoError(t, err)
	return c
}

func engine(role discovery.Role, zmq string) discovery.Endpoint {
	e := discovery.Endpoint{ID: "e", URL: &url.URL{Scheme: "http", Host: "10.0.1.9:20001"}, Role: role}
	if zmq != "" {
		e.Attributes = map[string]string{"zmqAddress": zmq}
	}
	return e
}

func session(t testing.TB, api connector.API, body, p, d string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return contract.NewSession(r, "the-clients-id", engine(discovery.RolePrefill, p), engine(discovery.RoleDecode, d))
}

type leg struct{ body, id string }

func legs(t testing.TB, c connector.KVConnector, s *connector.Session) (p, d leg) {
	t.Helper()
	read := func(l *connector.Leg) leg {
		body, err := contract.Body(l)
		require.NoError(t, err)
		require.Len(t, contract.Leg(l).Headers, 1)
		require.Equal(t, "X-Request-Id", contract.Leg(l).Headers[0].Name)
		return leg{string(body), contract.Leg(l).Headers[0].Value}
	}
	pl, dl := contract.NewPrefillLeg(s.Request, c.Traits()), contract.NewLeg(s.Request)
	require.NoError(t, c.Prefill(context.Background(), s, pl))
	response := &connector.PrefillResult{Status: 200, Body: []byte(`{"kv_transfer_params":null}`), At: time.Now()}
	require.NoError(t, c.Decode(context.Background(), s, response, dl))
	return read(pl), read(dl)
}

// These are the engines' own expressions (p2p_nccl_connector.py, parse_request_id): P finds D's address with one, D
// finds P's with the other.
var (
	findDecode  = regexp.MustCompile(`___decode_addr_(.*):(\d+)`)
	findPrefill = regexp.MustCompile(`___prefill_addr_(.*):(\d+)___`)
)

func TestBothLegsCarryOneIDThatHoldsBothAddresses(t *testing.T) {
	c := open(t, ``)
	s := session(t, connector.APICompletions, `{"prompt":"x","max_tokens":9,"stream":true,"request_id":"evil"}`,
		"10.0.1.2:21001", "10.0.1.3:22001")
	p, d := legs(t, c, s)
	assert.Equal(t, "___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_"+s.ID, p.id)
	assert.Equal(t, p.id, d.id)
	assert.Regexp(t, `_[0-9a-f]{32}$`, p.id)
	assert.NotContains(t, p.id, "the-clients-id")
	assert.Equal(t, `{"prompt":"x","max_tokens":1,"stream":false}`, p.body)
	assert.Equal(t, `{"prompt":"x","max_tokens":9,"stream":true}`, d.body, "D samples the first token itself")

	internal := "cmpl-" + p.id + "-0"
	assert.Equal(t, []string{"10.0.1.3", "22001"}, findDecode.FindStringSubmatch(internal)[1:], "as P parses it")
	assert.Equal(t, []string{"10.0.1.2", "21001"}, findPrefill.FindStringSubmatch(internal)[1:], "as D parses it")

	again, _ := legs(t, c, session(t, connector.APICompletions, `{"prompt":"x"}`, "10.0.1.2:21001", "10.0.1.3:22001"))
	assert.NotEqual(t, p.id, again.id, "each attempt has its own tensors")
}

func TestTheResponsesAPITakesTheIDFromTheBody(t *testing.T) {
	p, d := legs(t, open(t, ``), session(t, connector.APIResponses, `{"input":"x"}`, "a:1", "b:2"))
	assert.Contains(t, p.body, `"request_id":"`+p.id+`"`)
	assert.Contains(t, d.body, `"request_id":"`+p.id+`"`)
}

func TestIPv6AddressesKeepTheirBrackets(t *testing.T) {
	p, _ := legs(t, open(t, ``), session(t, connector.APIChat, `{"messages":[]}`, "[2001:db8::1]:21001", "[::1]:22001"))
	assert.Contains(t, p.id, "___prefill_addr_[2001:db8::1]:21001___decode_addr_[::1]:22001_")
	assert.Equal(t, "[::1]", findDecode.FindStringSubmatch(p.id)[1])
}

func TestAnAddressThatIsNotOneIsNotSent(t *testing.T) {
	c := open(t, ``)
	for _, bad := range []string{"", "10.0.1.2", "10.0.1.2:0", "10.0.1.2:65536", "10.0.1.2:x", ":21001",
		"2001:db8::1:21001", "http://10.0.1.2:21001", "a b:1", "a\r\nX-Evil: 1:1", "x___decode_addr_1.2.3.4:5"} {
		for name, s := range map[string]*connector.Session{
			"P": session(t, connector.APIChat, `{"messages":[]}`, bad, "b:2"),
			"D": session(t, connector.APIChat, `{"messages":[]}`, "a:1", bad),
		} {
			var missing *attr.Error
			require.ErrorAs(t, c.Prefill(context.Background(), s, contract.NewLeg(s.Request)), &missing, "%s of %s",
				bad, name)
			assert.Equal(t, "zmqAddress", missing.Attribute)
			require.ErrorAs(t, c.Decode(context.Background(), s, nil, contract.NewLeg(s.Request)), &missing)
		}
		var fault *config.FieldError
		require.ErrorAs(t, check.Of(c).CheckEndpoint(engine(discovery.RoleDecode, bad)), &fault)
		assert.Equal(t, "attributes.zmqAddress", fault.Path)
		assert.NoError(t, check.Of(c).CheckEndpoint(engine(discovery.RoleEncode, bad)),
			"an encode engine takes no part")
		assert.NoError(t, check.Of(c).CheckEndpoint(engine(discovery.RoleBoth, bad)), "nor does one that serves alone")
	}
	assert.NoError(t, check.Of(c).CheckEndpoint(engine(discovery.RolePrefill, "p-0.engines:21001")))
}

func TestDecodeEnginesServeNothingAlone(t *testing.T) {
	c := open(t, ``)
	assert.True(t, c.Traits().Serving.PairOnly)
	assert.True(t, c.Traits().Ending.Orphans)
	assert.Equal(t, connector.PrefillThenDecode, c.Traits().Order)
	assert.Equal(t, "p2pnccl", c.Traits().Name)
	for body, want := range map[string]string{`{"n":2}`: "n", `{"prompt":["a","b"]}`: "prompt", `{"prompt":"a"}`: ""} {
		assert.Equal(t, want, uncarried.Member(c, session(t, connector.APICompletions, body, "a:1", "b:2").Request))
	}
	assert.Equal(t, "text", uncarried.Member(c, session(t, connector.APISGLang, `{"text":"x"}`, "a:1", "b:2").Request))
}

func TestSettings(t *testing.T) {
	for settings, want := range map[string]string{
		`{"kv_port":0}`: "kv_port", `{"kv_port":"x"}`: "kv_port", `{"kv_port":1.5}`: "kv_port",
		`{"http_port":65536}`:     "http_port",
		`{"kv_buffer_size":"-1"}`: "kv_buffer_size", `{"kv_buffer_size":true}`: "kv_buffer_size",
		`{"kv_buffer_size":"1e999"}`: "kv_buffer_size",
		`{"send_type":"push"}`:       "PUT_ASYNC", `{"proxy_port":"1"}`: "proxy_ip",
		`{"kvport":1}`: "did you mean kv_port",
	} {
		_, err := connector.Open(config.Spec{Type: "p2pnccl", Config: json.RawMessage(settings)})
		require.ErrorContains(t, err, want, settings)
		require.NotEmpty(t, config.FieldErrors(err)[0].Path)
	}
}
