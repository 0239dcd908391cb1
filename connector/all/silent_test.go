// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/internal/play"
)

// stores need nothing in the requests: D finds by the prompt what P has put there.
var stores = []string{"lmcache", "mooncake-store", "ascend-store", "flexkv", "hf3fs", "ucm"}

func TestLegsOfProtocolsThatPutNothingOnTheWire(t *testing.T) {
	for _, k := range []struct {
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
			`{"max_tokens":2048,"thinking":{"type":"enabled","budget_tokens":1024}}`, `{"max_tokens":1,"stream":false}`,
			`{"max_tokens":2048,"thinking":{"type":"enabled","budget_tokens":1024}}`},
		{"thinking without a budget stays", connector.APIMessages,
			`{"max_tokens":2048,"thinking":{"type":"adaptive"}}`,
			`{"max_tokens":1,"thinking":{"type":"adaptive"},"stream":false}`,
			`{"max_tokens":2048,"thinking":{"type":"adaptive"}}`},
		{"SGLang", connector.APISGLang, `{"text":"x","sampling_params":{"max_new_tokens":7}}`,
			`{"text":"x","sampling_params":{"max_new_tokens":1},"stream":false}`,
			`{"text":"x","sampling_params":{"max_new_tokens":7}}`},
	} {
		for _, name := range append([]string{"http", "pynccl", "sharedstorage"}, stores...) {
			c := play.Open(t, name, ``)
			if !check.Of(c).Carries(k.api) {
				continue
			}
			s := play.Session(t, k.api, k.client)
			p := play.Prefill(t, c, s)
			assert.Equal(t, k.prefill, p.Body, "%s: %s", name, k.rule)
			assert.Empty(t, p.Header, name)
			for _, response := range []string{``, `garbage`, `{"kv_transfer_params":{"do_remote_prefill":true}}`,
				`{"kv_transfer_params":5}`} { // any response of P is enough
				d := play.Decode(t, c, s, play.Response(response))
				assert.Equal(t, k.decode, d.Body, "%s: %s", name, k.rule)
				assert.Empty(t, d.Header, name)
			}
		}
	}
}

// By default there is no wait between the legs. A settle time is waited for in full, unless the request ends.
func TestStoresSettleBetweenTheLegs(t *testing.T) {
	for _, name := range stores {
		synctest.Test(t, func(t *testing.T) {
			e, ok := connector.As[connector.Expecter](play.Open(t, name, ``))
			require.True(t, ok, name)
			wait, done := e.Expect(nil)
			assert.Nil(t, wait, name)
			done(nil)
			e, _ = connector.As[connector.Expecter](play.Open(t, name, `{"settleTime":"300ms"}`))
			wait, done = e.Expect(nil)
			require.NotNil(t, wait, name)
			begun := time.Now()
			_, err := wait(t.Context())
			require.NoError(t, err, name)
			assert.Equal(t, 300*time.Millisecond, time.Since(begun), name)
			done(nil)
		})
	}
}
