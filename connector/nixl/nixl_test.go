// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/internal/uncarried"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, o *nixl.Options) *nixl.Connector {
	t.Helper()
	c, err := nixl.New(o)
	require.NoError(t, err)
	return c.(*nixl.Connector)
}

func session(t testing.TB, api connector.API, body string) *connector.Session {
	t.Helper()
	r, err := connector.ParseRequest(api, []byte(body))
	require.NoError(t, err)
	return contract.NewSession(r, "id", discovery.Endpoint{}, discovery.Endpoint{})
}

func prefillLeg(t testing.TB, c connector.KVConnector, s *connector.Session) string {
	t.Helper()
	l := contract.NewPrefillLeg(s.Request, c.Traits())
	require.NoError(t, c.Prefill(context.Background(), s, l))
	body, err := contract.Body(l)
	require.NoError(t, err)
	return string(body)
}

// decodeLeg returns the decode leg that follows P's response.
func decodeLeg(c connector.KVConnector, s *connector.Session, response string) (string, error) {
	l := contract.NewLeg(s.Request)
	p := &connector.PrefillResult{Status: http.StatusOK, Body: []byte(response), At: time.Now()}
	if err := c.Decode(context.Background(), s, p, l); err != nil {
		return "", err
	}
	body, err := contract.Body(l)
	return string(body), err
}

// The golden exchanges are real ones of vLLM 0.32.0, with P's responses byte for byte, and handoffs that a real D was
// given (docs/protocols/nixl.md §3). Handoffs whose form makes D die, hang or fail must not reach it. Handoffs that D
// accepts must, also those whose fault only the engines can see. The recording scripts left "stream" out where false is
// the default.
func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open(nixl.Name), "testdata/golden")
}

// requireNoValue fails if an error's text holds a string or number of the handoff.
func requireNoValue(t *testing.T, err error, handoff []byte) {
	t.Helper()
	gjson.ParseBytes(handoff).ForEach(func(_, v gjson.Result) bool {
		// the texts hold these words of their own
		if (v.Type == gjson.String || v.Type == gjson.Number) && v.String() != "" && v.String() != "true" {
			assert.NotContains(t, err.Error(), v.String())
		}
		return true
	})
}

func TestPrefillAsksForAHandoff(t *testing.T) {
	s := session(t, connector.APIChat, `{"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil"},`+
		`"messages":[],"max_completion_tokens":9,"stream":true}`)
	assert.Equal(t, `{"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,`+
		`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null},"messages":[],`+
		`"max_completion_tokens":1,"stream":false,"max_tokens":1}`,
		prefillLeg(t, open(t, nil), s), "in place of what the client sent for one")
}

func TestThinkingStaysOnPrefill(t *testing.T) {
	s := session(t, connector.APIMessages, `{"thinking":{"type":"enabled","budget_tokens":1024},"max_tokens":2048}`)
	assert.Contains(t, prefillLeg(t, open(t, nil), s), `"thinking":{"type":"enabled","budget_tokens":1024}`,
		"do_remote_decode lifts the rule that max_tokens exceeds it")
}

func TestDecodeIsTheClientsRequestPlusTheHandoff(t *testing.T) {
	const handoff = `{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e",` +
		`"remote_request_id":"r","remote_host":"h","remote_port":1}`
	s := session(t, connector.APIChat, `{"messages":[],"kv_transfer_params":{"evil":true},"max_completion_tokens":9,`+
		`"stream":true,"stream_options":{"include_usage":true},"min_tokens":2,"logprobs":true}`)
	decode, err := decodeLeg(open(t, nil), s, `{"kv_transfer_params":`+handoff+`}`)
	require.NoError(t, err)
	assert.Equal(t, `{"messages":[],"kv_transfer_params":`+handoff+
		`,"max_completion_tokens":9,"stream":true,"stream_options":{"include_usage":true},"min_tokens":2,`+
		`"logprobs":true}`, decode)
}

func TestNameOrderLease(t *testing.T) {
	c := open(t, nil)
	assert.Equal(t, "nixl", c.Traits().Name)
	assert.Equal(t, connector.PrefillThenDecode, c.Traits().Order)
	assert.Equal(t, 30*time.Second, c.Traits().Handoff.Lease, "vLLM's kv_lease_duration")
	var zero nixl.Connector
	assert.Equal(t, 30*time.Second, zero.Traits().Handoff.Lease,
		"never without one: a handoff that does not age would be sent after its blocks were reused")
	lease := config.Duration(5 * time.Second)
	assert.Equal(t, 5*time.Second, open(t, &nixl.Options{LeaseDuration: &lease}).Traits().Handoff.Lease)
}

func TestUnsupported(t *testing.T) {
	c := open(t, nil)
	for _, k := range []struct {
		api          connector.API
		body, member string
	}{
		{connector.APIChat, `{"messages":[]}`, ""},
		{connector.APIChat, `{"n":2}`, "n"},
		{connector.APICompletions, `{"best_of":2}`, "best_of"},
		{connector.APICompletions, `{"prompt":["a","b"]}`, "prompt"},
		{connector.APIGenerate, `{"sampling_params":{"n":2}}`, "n"},
		{connector.APIResponses, `{"background":true}`, "background"},
		{connector.APISGLang, `{"text":"a"}`, "kv_transfer_params"},
	} {
		assert.Equal(t, k.member, uncarried.Member(c, session(t, k.api, k.body).Request), k.body)
	}
}

func TestClassNamesOfTheEngine(t *testing.T) {
	for _, name := range []string{"nixl", "NixlConnector", "NixlPullConnector"} {
		c, err := connector.Open(config.Spec{Type: name, Config: json.RawMessage(`{"leaseDuration":"7s"}`)})
		require.NoError(t, err)
		assert.IsType(t, &nixl.Connector{}, c)
		assert.Equal(t, 7*time.Second, c.Traits().Handoff.Lease)
	}
}

// One connector serves many sessions at once, and no session sees anything of another.
func TestSessionsAtOnceShareNothing(t *testing.T) {
	c := open(t, nil)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			id := strings.Repeat("x", i+1)
			s := session(t, connector.APICompletions, `{"prompt":"`+id+`","kv_transfer_params":{"a":1}}`)
			for range 20 {
				assert.Contains(t, prefillLeg(t, c, s), `{"prompt":"`+id+`",`)
				handoff := `{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e",` +
					`"remote_request_id":"` + id + `","remote_host":"h","remote_port":1}`
				decode, err := decodeLeg(c, s, `{"kv_transfer_params":`+handoff+`}`)
				assert.NoError(t, err)
				assert.Equal(t, `{"prompt":"`+id+`","kv_transfer_params":`+handoff+`}`, decode)
			}
		})
	}
	wg.Wait()
}
