// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"
	"slices"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pdkit/pdkit/connector"
)

// genAI are the metrics of OpenTelemetry's semantic conventions for generative AI, beside the flow's own. Names and
// buckets are those of the repository semantic-conventions-genai in October 2026, where all of them are in development.
type genAI struct {
	attributes                     []attribute.KeyValue // of every metric
	requests, firstToken, perToken metric.Float64Histogram
	input, output, cached          metric.Int64Counter
}

var (
	genAIDurations  = []float64{0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92}
	genAIFirstToken = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10}
	genAIPerToken   = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5}
)

func newGenAI(m metric.Meter, c *Config) (*genAI, error) {
	g := &genAI{attributes: append(slices.Clip(c.Attributes), attribute.String("gen_ai.provider.name", c.GenAI))}
	var errs []error
	hist := func(name, help string, buckets []float64) metric.Float64Histogram {
		h, err := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(help),
			metric.WithExplicitBucketBoundaries(buckets...))
		errs = append(errs, err)
		return h
	}
	count := func(name, help string) metric.Int64Counter {
		c, err := m.Int64Counter(name, metric.WithUnit("{token}"), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	g.requests = hist("gen_ai.server.request.duration", "Requests, to the last byte", genAIDurations)
	g.firstToken = hist("gen_ai.server.time_to_first_token", "Streams, to the first token", genAIFirstToken)
	g.perToken = hist("gen_ai.server.time_per_output_token", "Streams, by each token after the first", genAIPerToken)
	g.input = count("gen_ai.client.inference.usage.input_tokens", "Prompt tokens")
	g.output = count("gen_ai.client.inference.usage.output_tokens", "Generated tokens")
	g.cached = count("gen_ai.client.inference.usage.cache_read.input_tokens",
		"Prompt tokens that prefill had in its cache")
	return g, errors.Join(errs...)
}

// operation is gen_ai.operation.name. /inference/v1/generate and SGLang's own API complete tokens as completions do.
func operation(a connector.API) string {
	switch a {
	case connector.APIChat, connector.APIResponses, connector.APIMessages:
		return "chat"
	}
	return "text_completion"
}

// with are the attributes of a request's metrics. The model is the flow's own attribute where the program gave it one:
// a client can name what it likes where a flow serves any model.
func (g *genAI) with(api connector.API, code string, more ...attribute.KeyValue) metric.MeasurementOption {
	kv := append(more, attribute.String("gen_ai.operation.name", operation(api)))
	if code != "" {
		kv = append(kv, attribute.String("error.type", code))
	}
	return metric.WithAttributes(append(kv, g.attributes...)...)
}

// streamed records how fast the stream was that the client got, in seconds. g may be nil.
func (g *genAI) streamed(x *Request, first, each float64, output int64) {
	if g == nil {
		return
	}
	g.firstToken.Record(x.client, first, g.with(x.api, ""))
	if output > 1 {
		g.perToken.Record(x.client, each, g.with(x.api, ""))
	}
}

// counted adds up the tokens of an attempt that has served. No engine tells of which modality they are. g may be nil.
func (g *genAI) counted(x *Request, u Usage) {
	if g == nil {
		return
	}
	with := g.with(x.api, "", attribute.String("gen_ai.token.modality", "unknown"))
	for _, c := range [...]struct {
		counter metric.Int64Counter
		n       int64
	}{{g.input, u.Input}, {g.output, u.Output}, {g.cached, u.Cached}} {
		if c.n > 0 {
			c.counter.Add(x.client, c.n, with)
		}
	}
}
