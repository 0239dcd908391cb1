// SPDX-License-Identifier: Apache-2.0

package nixlpush_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/uncarried"
	"github.com/pdkit/pdkit/connector/nixlpush"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
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

func open(t testing.TB, o *nixlpush.Options) *nixlpush.Connector {
	t.Helper()
	c, err := nixlpush.New(o)
	require.NoError(t, err)
	return c
}

func session(t testing.TB, api connector.API, body string, attributes map[string]string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	p, err := discovery.New("http://127.0.0.1:8100", discovery.RolePrefill)
	require.NoError(t, err)
	d, err := discovery.New("http://127.0.0.1:8200", discovery.RoleDecode)
	require.NoError(t, err)
	p.Attributes = attributes
	return contract.NewSession(r, "id", p, d)
}

func response(t testing.TB, body string) *connector.PrefillResult {
	t.Helper()
	p := &connector.PrefillResult{Status: http.StatusOK, Body: []byte(body), At: time.Now()}
	require.NoError(t, p.Err())
	return p
}

func TestOrders(t *testing.T) {
	var zero nixlpush.Connector
	for _, c := range []*nixlpush.Connector{open(t, nil), &zero} {
		assert.Equal(t, connector.Together, c.Traits().Order)
		assert.Equal(t, []connector.Order{connector.PrefillThenDecode}, c.Traits().OtherOrders,
			"either leg may come first")
		assert.Equal(t, 30*time.Second, c.Traits().Handoff.Lease, "vLLM's kv_lease_duration")
	}
	serial := open(t, &nixlpush.Options{Dispatch: "serial"})
	assert.Equal(t, connector.PrefillThenDecode, serial.Traits().Order)
	assert.Empty(t, serial.Traits().OtherOrders, "nothing but P's response says where P is")
	assert.True(t, serial.Traits().Ending.Orphans)
}

// A connector that combines others may run this one serially, although both legs could go out together.
func TestP_HandoffIsRelayedWhereThereIsOne(t *testing.T) {
	s := session(t, connector.APICompletions, `{"prompt":"x"}`, nil)
	leg := contract.NewLeg(s.Request)
	require.NoError(t, open(t, nil).Decode(context.Background(), s, response(t, `{"kv_transfer_params":`+handoff(s)+
		`}`), leg))
	body, err := contract.Body(leg)
	require.NoError(t, err)
	assert.Equal(t, `{"prompt":"x","kv_transfer_params":`+handoff(s)+`}`, string(body),
		"to the byte, and without attributes")
}

// D reads tp_size without a default and dies if it is missing (vLLM 0.32.0, push_scheduler.py). The pull connector's D
// does not.
func TestAHandoffWithoutTPSizeIsNotRelayed(t *testing.T) {
	s := session(t, connector.APICompletions, `{"prompt":"x"}`, nil)
	for _, size := range []string{"", `"tp_size":null,`, `"tp_size":0,`, `"tp_size":"1",`, `"tp_size":1e400,`} {
		bad := response(t, `{"kv_transfer_params":`+strings.Replace(handoff(s), `"tp_size":1,`, size, 1)+`}`)
		for _, dispatch := range []string{"serial", "together"} {
			err := open(t, &nixlpush.Options{Dispatch: dispatch}).Decode(context.Background(), s, bad,
				contract.NewLeg(s.Request))
			require.ErrorIs(t, err, connector.ErrNoTransfer, size)
		}
	}
}

func TestSerialNeedsNoAttributes(t *testing.T) {
	s := session(t, connector.APICompletions, `{"prompt":"x"}`, nil)
	serial := open(t, &nixlpush.Options{Dispatch: "serial"})
	require.NoError(t, serial.CheckEndpoint(s.Prefill))
	require.NoError(t, serial.Prefill(context.Background(), s, contract.NewPrefillLeg(s.Request, serial.Traits())))
	require.ErrorIs(t, serial.Decode(context.Background(), s, nil, contract.NewLeg(s.Request)),
		connector.ErrNoTransfer, "D would wait for ever")
}

func TestResponsesCannotNameARank(t *testing.T) {
	many := attributes()
	many["dpSize"] = "2"
	s := session(t, connector.APIResponses, `{"input":"x"}`, many)
	var bad *connector.UnsupportedError
	require.ErrorAs(t, open(t, nil).Prefill(context.Background(), s, contract.NewLeg(s.Request)), &bad)
	assert.Equal(t, "X-data-parallel-rank", bad.Member)
	assert.NoError(
		t, open(t, &nixlpush.Options{Dispatch: "serial"}).Prefill(context.Background(), s, contract.NewLeg(s.Request)),
		"P's response names the rank that it chose")
}

func TestEachAttemptHasAnIDOfItsOwn(t *testing.T) {
	var ids []string
	for range 2 {
		s := session(t, connector.APIChat, `{"messages":[],"request_id":"client"}`, attributes())
		p, d := contract.NewPrefillLeg(s.Request, open(t, nil).Traits()), contract.NewLeg(s.Request)
		require.NoError(t, open(t, nil).Prefill(context.Background(), s, p))
		require.NoError(t, open(t, nil).Decode(context.Background(), s, nil, d))
		require.Equal(t, contract.Leg(p).Headers, contract.Leg(d).Headers, "P finds D's registration by it")
		require.Len(t, contract.Leg(p).Headers, 1)
		ids = append(ids, contract.Leg(p).Headers[0].Value)
	}
	assert.NotEqual(t, ids[0], ids[1])
	assert.NotContains(t, ids, "client")
}

// TestCheckEndpoint finds at start what would otherwise make requests hang.
func TestCheckEndpoint(t *testing.T) {
	for rule, c := range map[string]struct {
		role       discovery.Role
		attributes map[string]string
		paths      []string
	}{
		"good":                          {discovery.RolePrefill, attributes(), nil},
		"a decode engine needs nothing": {discovery.RoleDecode, nil, nil},
		"both are a prefill engine too": {discovery.RoleBoth, nil,
			[]string{"attributes.engineID", "attributes.sideChannelPort"}},
		"all faults at once": {discovery.RolePrefill, map[string]string{"tpSize": "0", "ppSize": "x"},
			[]string{"attributes.engineID", "attributes.sideChannelPort", "attributes.tpSize", "attributes.ppSize"}},
		"a URL is no host": {discovery.RolePrefill,
			map[string]string{"engineID": "e", "sideChannelPort": "1", "sideChannelHost": "tcp://h"},
			[]string{"attributes.sideChannelHost"}},
		"no port for the last rank": {discovery.RolePrefill,
			map[string]string{"engineID": "e", "sideChannelPort": "65535", "dpSize": "2"},
			[]string{"attributes.sideChannelPort"}},
		"the last port for the only one": {discovery.RolePrefill,
			map[string]string{"engineID": "e", "sideChannelPort": "65535"}, nil},
	} {
		t.Run(rule, func(t *testing.T) {
			e, err := discovery.New("http://127.0.0.1:8100", c.role)
			require.NoError(t, err)
			e.Attributes = c.attributes
			var paths []string
			for _, fault := range config.FieldErrors(open(t, nil).CheckEndpoint(e)) {
				paths = append(paths, fault.Path)
				assert.NotEmpty(t, fault.Remedy)
			}
			assert.Equal(t, c.paths, paths)
		})
	}
}

func TestUnsupported(t *testing.T) {
	c := open(t, nil)
	for body, member := range map[string]string{`{"prompt":"a"}`: "", `{"prompt":["a","b"]}`: "prompt",
		`{"n":2}`: "n"} {
		r, err := connector.ParseRequest(connector.APICompletions, []byte(body))
		require.NoError(t, err)
		assert.Equal(t, member, uncarried.Member(c, r), body)
	}
}
