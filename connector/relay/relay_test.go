// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/uncarried"
	"github.com/pdkit/pdkit/connector/relay"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func open(t testing.TB, name, settings string) *relay.Connector {
	t.Helper()
	c, err := connector.Open(config.Spec{Type: name, Config: json.RawMessage(settings)})
	require.NoError(t, err)
	return c.(*relay.Connector)
}

func session(t testing.TB, body string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(connector.APIChat, []byte(body))
	require.NoError(t, err)
	return contract.NewSession(r, "r-1", discovery.Endpoint{}, discovery.Endpoint{})
}

// decode plays decode after a response of P's.
func decode(t *testing.T, c *relay.Connector, header http.Header, body string) (string, http.Header, error) {
	t.Helper()
	s := session(t, `{"messages":[]}`)
	leg := contract.NewLeg(s.Request)
	p := &connector.PrefillResult{Status: http.StatusOK, Header: header, Body: []byte(body), At: time.Now()}
	if err := c.Decode(context.Background(), s, p, leg); err != nil {
		return "", nil, err
	}
	raw, err := contract.Body(leg)
	require.NoError(t, err)
	set := http.Header{}
	for _, h := range contract.Leg(leg).Headers {
		set.Set(h.Name, h.Value)
	}
	return string(raw), set, nil
}

func TestWhereParametersStand(t *testing.T) {
	ticket := http.Header{"X-Kv-Ticket": {"t-17"}}
	for name, m := range map[string]struct {
		settings, response, want, header string
	}{
		"a top-level member": {`{"member":"ticket"}`, `{"ticket":{"a":1.50}}`,
			`{"messages":[],"ticket":{"a":1.50}}`, ""},
		"the default": {``, `{"kv_transfer_params":{"a": 1}}`,
			`{"messages":[],"kv_transfer_params":{"a": 1}}`, ""},
		"a nested member": {`{"member":"engine.kv"}`, `{"engine":{"x":0,"kv":{"a":1}}}`,
			`{"messages":[],"engine":{"kv":{"a":1}}}`, ""},
		"a header": {`{"header":"x-kv-ticket"}`, `{}`, `{"messages":[]}`, "t-17"},
		"from a header into a member": {`{"header":"X-KV-Ticket","member":"t"}`, `{}`,
			`{"messages":[],"t":"t-17"}`, ""},
		"a header into vLLM's own one": {`{"header":"X-KV-Ticket","member":"kv_transfer_params.id"}`, `{}`,
			`{"messages":[],"kv_transfer_params":{"id":"t-17"}}`, ""},
	} {
		body, header, err := decode(t, open(t, "relay", m.settings), ticket, m.response)
		require.NoError(t, err, name)
		assert.Equal(t, m.want, body, name)
		assert.Equal(t, m.header, header.Get("X-KV-Ticket"), name)
	}
}

func TestEachRequiredKeyIsOfItsKind(t *testing.T) {
	c := open(t, "relay", `{"required":{"s":"string","i":"integer","l":"list","o":"object","t":"flag"}}`)
	good := map[string]string{"s": `"x"`, "i": "-1", "l": "[0]", "o": `{"a":0}`, "t": "true"}
	write := func(change map[string]string) string {
		all := map[string]json.RawMessage{}
		for key, v := range good {
			if c, ok := change[key]; ok {
				v = c
			}
			if v != "" {
				all[key] = json.RawMessage(v)
			}
		}
		raw, err := json.Marshal(map[string]any{"kv_transfer_params": all})
		require.NoError(t, err)
		return string(raw)
	}
	_, _, err := decode(t, c, nil, write(nil))
	require.NoError(t, err)
	for key, bad := range map[string][]string{"s": {"", `""`, "1", "null"}, "i": {"", "1.5", `"1"`, "null"},
		"l": {"", "[ ]", "{}", `"x"`}, "o": {"", "{ }", "[1]", "null"}, "t": {"", "false", "1", "null"}} {
		for _, v := range bad {
			_, _, err := decode(t, c, nil, write(map[string]string{key: v}))
			require.ErrorIs(t, err, connector.ErrNoTransfer, "%s: %s", key, v)
			assert.Contains(t, err.Error(), key)
		}
	}
}

func TestAnEmptyObjectIsPassedOnIfTheSettingsSaySo(t *testing.T) {
	const nothing = `{"kv_transfer_params":{ }}`
	_, _, err := decode(t, open(t, "relay", `{"required":{"a":"string"}}`), nil, nothing)
	require.ErrorIs(t, err, connector.ErrNoTransfer)
	_, _, err = decode(t, open(t, "relay", ``), nil, nothing)
	require.ErrorIs(t, err, connector.ErrNoTransfer)
	body, _, err := decode(t, open(t, "relay", `{"required":{"a":"string"},"passEmpty":true}`), nil, nothing)
	require.NoError(t, err)
	assert.JSONEq(t, `{"messages":[],"kv_transfer_params":{}}`, body)
}

// tpu-inference runs an engine on several hosts, each with an address and a port, or with several groups of layers.
func TestTPUParametersOfSeveralHostsAndGroups(t *testing.T) {
	c := open(t, "TPUConnector", ``)
	for _, params := range []string{
		tpuParams,
		`{"uuid":1,"remote_block_ids":[[1,2],[3]],"remote_host":["10.0.0.5","10.0.0.6"],"remote_port":["9100","9101"]}`,
		`{"uuid":1,"remote_block_ids":[ [1] ],"remote_host":["fd00::5"],"remote_port":[9100]}`,
	} {
		body, _, err := decode(t, c, nil, `{"kv_transfer_params":`+params+`}`)
		require.NoError(t, err)
		assert.Contains(t, body, `"kv_transfer_params":`+params, "byte for byte")
	}
}

func TestTraits(t *testing.T) {
	relay := open(t, "relay", `{"leaseDuration":"20s"}`)
	assert.Equal(t, connector.Handoff{Member: "kv_transfer_params", Lease: 20 * time.Second}, relay.Traits().Handoff)
	assert.Equal(t, "n", uncarried.Member(relay, session(t, `{"n":2}`).Request), "what P names is read once")
	assert.Zero(t, open(t, "relay", ``).Traits().Handoff.Lease)
	tpu := open(t, "tpu", ``).Traits()
	assert.Equal(t, 180*time.Second, tpu.Handoff.Lease)
	assert.True(t, tpu.Ending.EndsByLength)
	header := open(t, "relay", `{"header":"X-KV-Ticket"}`).Traits()
	assert.Equal(t, connector.Handoff{Header: "X-KV-Ticket"}, header.Handoff)
	assert.Empty(t, header.Members)
}
