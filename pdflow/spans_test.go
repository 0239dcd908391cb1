// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// stages is a connector with everything around the legs.
type stages struct{ fake }

func (*stages) Prepare(context.Context, *connector.Session, connector.Caller) (any, error) {
	return 1, nil
}

func (*stages) Clean(context.Context, *connector.Session, error, connector.Caller) error {
	return nil
}

func (*stages) Items(*connector.Session) []connector.Item {
	return []connector.Item{{ID: "a"}, {ID: "b"}}
}

func (*stages) Encode(*connector.Session, connector.Item, *connector.Leg) error { return nil }

func (*stages) Merge(*connector.Session, []json.RawMessage) error { return nil }

// Whatever an attempt waits for has a span.
func TestEachStageHasItsSpan(t *testing.T) {
	x := &tree{}
	encode := endpoint(t, serve(t, says(200, `{}`)), discovery.RoleEncode)
	s := script(t, &stages{}, answer(ok), status(500), traced(x))
	s.pair.Encode, s.pair.Reason = []discovery.Endpoint{encode}, "interference"
	_, err := s.flow.Do(t.Context(), &pdflow.Request{API: connector.APIChat,
		Body: []byte(`{"model":"m","messages":[{"role":"user","content":"secret"}]}`), Pick: &s.pair})
	require.ErrorIs(t, err, pdflow.CodeDecodeFailed)
	assert.Equal(t, []string{">pd.request", "pd.request>pd.cleanup", "pd.request>pd.decode", "pd.request>pd.encode",
		"pd.request>pd.encode", "pd.request>pd.prefill", "pd.request>pd.prepare"}, x.list(t))
	for _, n := range x.spans {
		switch n.name {
		case "pd.request":
			assert.Equal(t, "chat", n.attributes["gen_ai.operation.name"])
			assert.Equal(t, "decode_failed", n.attributes["error.type"])
			assert.Equal(t, "interference", n.attributes["pd.reason"])
		case "pd.encode":
			assert.Equal(t, encode.ID, n.attributes["pd.endpoint"])
		}
		of, engine := map[string]discovery.Endpoint{"pd.prefill": s.pair.Prefill, "pd.prepare": s.pair.Prefill,
			"pd.decode": s.pair.Decode, "pd.encode": encode}[n.name]
		if engine { // service maps find engines so
			assert.Equal(t, of.URL.Hostname(), n.attributes["server.address"], n.name)
			assert.Equal(t, of.URL.Port(), n.attributes["server.port"], n.name)
			if n.name != "pd.prepare" {
				assert.Equal(t, "POST", n.attributes["http.request.method"], n.name)
			}
		}
		for _, v := range n.attributes {
			assert.NotContains(t, v, "secret")
		}
	}
}

func TestARescueHasItsSpan(t *testing.T) {
	x := &tree{}
	f, _ := rescuing(t, traced(x))
	require.NoError(t, f.struck(rescuableChat(""), enginesim.FaultKill, 5).err)
	require.Eventually(t, func() bool { return len(f.seen.list()) == 2 }, 20*time.Second, time.Millisecond)
	assert.Contains(t, x.list(t), "pd.request>pd.rescue")
	assert.Equal(t, []string{"pd.request>pd.rescue pd.result=rescued pd.reason=stream_broken"}, x.events)
}

// What became of a stream whose decode engine died stands in the request's span, also where it was not rescued.
func TestTheRequestsSpanTellsWhyAStreamIsNotRescued(t *testing.T) {
	for want, end := range map[string]func(body string, other *enginesim.Engine) string{
		"pd.result=refused pd.reason=temperature": func(body string, _ *enginesim.Engine) string {
			return strings.Replace(body, `"temperature":0`, `"temperature":1`, 1)
		},
		"pd.result=failed pd.reason=decode_failed": func(body string, other *enginesim.Engine) string {
			require.NoError(t, other.Close())
			return body
		},
	} {
		x := &tree{}
		f, other := rescuing(t, traced(x), pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
		c := rescuableChat("")
		c.body = end(c.body, other)
		require.Error(t, f.struck(c, enginesim.FaultKill, 5).err)
		require.NoError(t, f.flow.Shutdown(t.Context()))
		x.list(t)
		assert.Contains(t, x.events, "pd.request>pd.rescue "+want)
	}
}

// The names that the design documents have.
func TestSpansHaveTheNamesThatTheProgramGives(t *testing.T) {
	x := &tree{}
	s := script(t, &fake{}, answer(ok),
		answer(`{"choices":[{"text":"hi"}],"usage":{"prompt_tokens":9,"completion_tokens":3}}`),
		traced(x),
		pdflow.WithTelemetry(pdflow.Telemetry{
			SpanName: func(connector, operation string) string { return "kv." + connector + "." + operation }}))
	s.one(t, completion("hi", ""))
	assert.Equal(t, []string{">kv.fake.request", "kv.fake.request>kv.fake.decode", "kv.fake.request>kv.fake.prefill"},
		x.list(t))
	request := x.spans[0].attributes
	assert.Equal(t, "text_completion", request["gen_ai.operation.name"])
	assert.Equal(t, "9", request["gen_ai.usage.input_tokens"])
	assert.Equal(t, "3", request["gen_ai.usage.output_tokens"])
}

// The conventions' own metrics are recorded beside the flow's, if the program asks for them.
func TestMetricsOfTheConventionsForGenerativeAI(t *testing.T) {
	for _, on := range []bool{false, true} {
		b := &book{}
		opts := []pdflow.Option{metered(b),
			pdflow.WithTelemetry(pdflow.Telemetry{
				Attributes: []attribute.KeyValue{attribute.String("gen_ai.request.model", "m")}})}
		if on {
			opts = append(opts, pdflow.WithTelemetry(pdflow.Telemetry{GenAI: "vllm"}))
		}
		x := script(t, &fake{}, answer(prefilled), stream(time.Millisecond, `{"choices":[{"text":"a"}]}`,
			`{"choices":[{"text":"b"}],"usage":{"prompt_tokens":930,"completion_tokens":2}}`), opts...)
		x.one(t, completion("hi", `"stream":true`))
		const labels = " gen_ai.operation.name=text_completion gen_ai.provider.name=vllm gen_ai.request.model=m"
		if !on {
			assert.Zero(t, b.count("gen_ai.*"))
			continue
		}
		require.Eventually(t, func() bool { return len(b.of("gen_ai.server.request.duration"+labels)) == 1 },
			20*time.Second, time.Millisecond)
		assert.Len(t, b.of("gen_ai.server.time_to_first_token"+labels), 1)
		assert.Len(t, b.of("gen_ai.server.time_per_output_token"+labels), 1)
		const tokens = labels + " gen_ai.token.modality=unknown"
		assert.Equal(t, []float64{930}, b.of("gen_ai.client.inference.usage.input_tokens"+tokens))
		assert.Equal(t, []float64{2}, b.of("gen_ai.client.inference.usage.output_tokens"+tokens))
	}
}
