// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/relay"
)

// decode plays decode after a response of P's.
func decode(t *testing.T, c connector.KVConnector, header http.Header, body string) (play.Leg, error) {
	t.Helper()
	p := play.Response(body)
	p.Header = header
	return play.TryDecode(c, play.Session(t, connector.APIChat, `{"messages":[]}`), p)
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
		leg, err := decode(t, play.Open(t, relay.Name, m.settings), ticket, m.response)
		require.NoError(t, err, name)
		assert.Equal(t, m.want, leg.Body, name)
		assert.Equal(t, m.header, leg.Header.Get("X-KV-Ticket"), name)
	}
}

func TestEachRequiredKeyIsOfItsKind(t *testing.T) {
	c := play.Open(t, relay.Name, `{"required":{"s":"string","i":"integer","l":"list","o":"object","t":"flag"}}`)
	use := func(params string) error {
		_, err := decode(t, c, nil, `{"kv_transfer_params":`+params+`}`)
		return err
	}
	const good = `{"s":"x","i":-1,"l":[0],"o":{"a":0},"t":true}`
	require.NoError(t, use(good))
	play.Spoilt(t, good, map[string][]string{"s": {"-", `""`, "1", "null"}, "i": {"-", "1.5", `"1"`, "null"},
		"l": {"-", "[ ]", "{}", `"x"`}, "o": {"-", "{ }", "[1]", "null"}, "t": {"-", "false", "1", "null"}}, use)
}

func TestAnEmptyObjectIsPassedOnIfTheSettingsSaySo(t *testing.T) {
	const nothing = `{"kv_transfer_params":{ }}`
	_, err := decode(t, play.Open(t, relay.Name, `{"required":{"a":"string"}}`), nil, nothing)
	require.ErrorIs(t, err, connector.ErrNoTransfer)
	_, err = decode(t, play.Open(t, relay.Name, ``), nil, nothing)
	require.ErrorIs(t, err, connector.ErrNoTransfer)
	leg, err := decode(t, play.Open(t, relay.Name, `{"required":{"a":"string"},"passEmpty":true}`), nil, nothing)
	require.NoError(t, err)
	assert.JSONEq(t, `{"messages":[],"kv_transfer_params":{}}`, leg.Body)
}

// tpu-inference runs an engine on several hosts, each with an address and a port, or with several groups of layers.
func TestTPUParametersOfSeveralHostsAndGroups(t *testing.T) {
	c := play.Open(t, relay.TPUName, ``)
	for _, params := range []string{
		tpuParams,
		`{"uuid":1,"remote_block_ids":[[1,2],[3]],"remote_host":["10.0.0.5","10.0.0.6"],"remote_port":["9100","9101"]}`,
		`{"uuid":1,"remote_block_ids":[ [1] ],"remote_host":["fd00::5"],"remote_port":[9100]}`,
	} {
		leg, err := decode(t, c, nil, `{"kv_transfer_params":`+params+`}`)
		require.NoError(t, err)
		assert.Contains(t, leg.Body, `"kv_transfer_params":`+params, "byte for byte")
	}
}
