// SPDX-License-Identifier: Apache-2.0

package pynccl_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/uncarried"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, settings string) connector.KVConnector {
	t.Helper()
	c, err := connector.Open(config.Spec{Type: "PyNcclConnector", Config: json.RawMessage(settings)})
	require.NoError(t, err)
	return c
}

func session(t testing.TB, api connector.API, body string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return contract.NewSession(r, "id", discovery.Endpoint{}, discovery.Endpoint{})
}

var response = &connector.PrefillResult{Status: 200, Body: []byte(`{}`), At: time.Now()}

func TestNothingIsOnTheWire(t *testing.T) {
	c := open(t, ``)
	assert.Equal(t, "pynccl", c.Traits().Name)
	assert.Equal(t, connector.PrefillThenDecode, c.Traits().Order)
	s := session(t, connector.APIChat, `{"messages":[],"max_completion_tokens":9,"stream":true,`+
		`"kv_transfer_params":{}}`)
	p, d := contract.NewPrefillLeg(s.Request, c.Traits()), contract.NewLeg(s.Request)
	require.NoError(t, c.Prefill(context.Background(), s, p))
	require.NoError(t, c.Decode(context.Background(), s, response, d))
	body, err := contract.Body(p)
	require.NoError(t, err)
	assert.Equal(t, `{"messages":[],"max_completion_tokens":1,"stream":false,"max_tokens":1}`, string(body))
	body, err = contract.Body(d)
	require.NoError(t, err)
	assert.Equal(t, `{"messages":[],"max_completion_tokens":9,"stream":true}`, string(body))
	assert.Empty(t, contract.Leg(p).Headers)
	assert.Empty(t, contract.Leg(d).Headers)
}

func TestUnsupported(t *testing.T) {
	assert.Equal(t, "n", uncarried.Member(open(t, ``), session(t, connector.APIChat, `{"n":2}`).Request),
		"the buffer gives a prompt's KV once")
	assert.Equal(t, "text", uncarried.Member(open(t, ``), session(t, connector.APISGLang, `{"text":"x"}`).Request))
	assert.Empty(t, uncarried.Member(open(t, ``), session(t, connector.APICompletions, `{"prompt":"x"}`).Request))
}

func TestSettings(t *testing.T) {
	open(t, `{"kv_rank":0,"kv_parallel_size":2,"kv_buffer_size":"1e9","kv_port":"14579","kv_ip":"10.0.0.1",`+
		`"kv_buffer_device":"cuda"}`)
	for settings, want := range map[string]string{
		`{"kv_parallel_size":3}`: "kv_parallel_size", `{"kv_rank":2}`: "kv_rank", `{"kv_port":65533}`: "kv_port",
		`{"kv_port":1.5}`:      "kv_port",
		`{"kv_buffer_size":0}`: "kv_buffer_size", `{"kv_buffer_device":"gpu"}`: "kv_buffer_device",
		`{"kv_rnk":0}`: "did you mean kv_rank",
	} {
		_, err := connector.Open(config.Spec{Type: "pynccl", Config: json.RawMessage(settings)})
		require.ErrorContains(t, err, want, settings)
		require.NotEmpty(t, config.FieldErrors(err)[0].Path)
	}
}
