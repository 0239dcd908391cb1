// SPDX-License-Identifier: Apache-2.0

package plainhttp_test

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
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, o *plainhttp.Options) *plainhttp.Connector {
	t.Helper()
	c, err := plainhttp.New(o)
	require.NoError(t, err)
	return c
}

func session(t *testing.T, api connector.API, body string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return contract.NewSession(r, "id", discovery.Endpoint{}, discovery.Endpoint{})
}

func legs(t *testing.T, c *plainhttp.Connector, s *connector.Session, body string) (prefill, decode string) {
	t.Helper()
	p, d := contract.NewPrefillLeg(s.Request, c.Traits()), contract.NewLeg(s.Request)
	require.NoError(t, c.Prefill(context.Background(), s, p))
	response := &connector.PrefillResult{Status: 200, Body: []byte(body), At: time.Now()}
	require.NoError(t, c.Decode(context.Background(), s, response, d))
	assert.Empty(t, contract.Leg(p).Headers)
	assert.Empty(t, contract.Leg(d).Headers)
	assert.Equal(t, s.API.Path(), contract.Path(p))
	assert.Equal(t, s.API.Path(), contract.Path(d))
	pb, err := contract.Body(p)
	require.NoError(t, err)
	db, err := contract.Body(d)
	require.NoError(t, err)
	return string(pb), string(db)
}

func TestLegs(t *testing.T) {
	for _, c := range []struct {
		rule                    string
		api                     connector.API
		client, prefill, decode string
	}{
		{"P is asked for one token, D for what the client asked", connector.APIChat,
			`{"model":"m","messages":[ {} ],"stream":true,"stream_options":{},"max_completion_tokens":9}`,
			`{"model":"m","messages":[ {} ],"stream":false,"max_completion_tokens":1,"max_tokens":1}`,
			`{"model":"m","messages":[ {} ],"stream":true,"stream_options":{},"max_completion_tokens":9}`},
		{"transfer members of the client reach neither", connector.APICompletions,
			`{"prompt":"x","kv_transfer_params":{"do_remote_prefill":true},"vllm_xargs":{"kv_transfer_params":1},` +
				`"request_id":"r"}`,
			`{"prompt":"x","vllm_xargs":{},"max_tokens":1,"stream":false}`, `{"prompt":"x","vllm_xargs":{}}`},
		{"a budget of thinking would make P refuse a limit of 1", connector.APIMessages,
			`{"max_tokens":2048,"thinking":{"type":"enabled","budget_tokens":1024}}`,
			`{"max_tokens":1,"stream":false}`, `{"max_tokens":2048,"thinking":{"type":"enabled",` +
				`"budget_tokens":1024}}`},
		{"thinking without a budget stays", connector.APIMessages,
			`{"max_tokens":2048,"thinking":{"type":"adaptive"}}`,
			`{"max_tokens":1,"thinking":{"type":"adaptive"},"stream":false}`,
			`{"max_tokens":2048,"thinking":{"type":"adaptive"}}`},
		{"SGLang", connector.APISGLang,
			`{"text":"x","sampling_params":{"max_new_tokens":7}}`,
			`{"text":"x","sampling_params":{"max_new_tokens":1},"stream":false}`,
			`{"text":"x","sampling_params":{"max_new_tokens":7}}`},
	} {
		t.Run(c.rule, func(t *testing.T) {
			prefill, decode := legs(t, open(t, nil), session(t, c.api, c.client),
				`{"kv_transfer_params":{"do_remote_prefill":true}}`)
			assert.Equal(t, c.prefill, prefill)
			assert.Equal(t, c.decode, decode, "nothing of P's response is relayed")
		})
	}
}

func TestAnyResponseOfPIsEnough(t *testing.T) {
	s := session(t, connector.APIChat, `{"messages":[]}`)
	for _, body := range []string{``, `garbage`, `{"kv_transfer_params":5}`} {
		_, decode := legs(t, open(t, nil), s, body)
		assert.Equal(t, `{"messages":[]}`, decode)
	}
	require.NoError(t, open(t, nil).Decode(context.Background(), s, nil, contract.NewLeg(s.Request)))
}

func TestUnsupported(t *testing.T) {
	c := open(t, nil)
	assert.Empty(t, uncarried.Member(c, session(t, connector.APIChat, `{"n":2}`).Request),
		"there is no handoff that only one response could read")
	assert.Equal(t, "prompt", uncarried.Member(c, session(t, connector.APICompletions, `{"prompt":["a","b"]}`).Request))
	assert.Equal(
		t, "prompt_logprobs", uncarried.Member(c, session(t, connector.APIChat, `{"prompt_logprobs":1}`).Request),
	)
	assert.Empty(t, uncarried.Member(c, session(t, connector.APISGLang, `{"text":"a"}`).Request))
}

func TestNameOrderAndNoLease(t *testing.T) {
	c := open(t, nil)
	assert.Equal(t, "http", c.Traits().Name)
	assert.Equal(t, connector.PrefillThenDecode, c.Traits().Order)
	assert.Zero(t, c.Traits().Handoff.Lease, "nothing is known of the KV's life")
	var zero plainhttp.Connector
	assert.Equal(t, "http", zero.Traits().Name, "the zero value is ready")
}

func openConfig(settings string) (connector.KVConnector, error) {
	return connector.Open(config.Spec{Config: json.RawMessage(settings)})
}

func TestSettingsOfOldFiles(t *testing.T) {
	for settings, want := range map[string]struct {
		prefill  time.Duration
		attempts int
	}{
		``: {}, `{}`: {}, `null`: {},
		`{"kvTransferMethod":"implicit"}`:         {},
		`{"requestTimeout":"30s","maxRetries":3}`: {30 * time.Second, 4},
		`{"requestTimeout":"0s","maxRetries":0}`:  {},
	} {
		c, err := openConfig(settings)
		require.NoError(t, err, settings)
		traits := c.Traits()
		assert.Equal(t, want.prefill, traits.Timeouts.Prefill, settings)
		assert.Equal(t, want.attempts, traits.Retry.MaxAttempts, "the first attempt included: %s", settings)
	}
}

func TestBadSettings(t *testing.T) {
	for settings, want := range map[string]string{
		`{"kvTransferMethod":"explicit"}`: "use type nixl",
		`{"kvTransferMethod":"magic"}`:    "implicit is the only one",
		`{"requestTimeout":"-1s"}`:        "requestTimeout",
		`{"requestTimeout":30}`:           "requestTimeout",
		`{"maxRetries":-1}`:               "maxRetries",
		`{"maxRetry":1}`:                  "maxRetries",
		`[]`:                              "object",
	} {
		_, err := openConfig(settings)
		require.Error(t, err, settings)
		assert.ErrorContains(t, err, want)
		assert.NotEmpty(t, config.FieldErrors(err))
	}
}
