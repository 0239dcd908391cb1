// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"errors"
	"log/slog"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow/internal/telemetry"
)

// Refusal is a request that no flow took: its path, its body or its model was wrong, or its flow could not start. An
// engine has seen nothing of it, and no session is told of it.
type Refusal struct {
	RequestID string
	API       connector.API // APIUnknown: there is no such path
	Model     string        // what the client named; "" if its body could not be read
	Err       *Error
}

// refusals tells of the requests that are refused before that. A nil *refusals tells nobody.
type refusals struct {
	counter    metric.Int64Counter // nil: not counted
	attributes []attribute.KeyValue
	logger     *slog.Logger
	observers  []Observer

	// flows returns those of a Mux's flow, whose counter and logger a Mux without its own uses; nil for a flow's.
	flows func() *refusals
}

// to returns where a refusal is counted and logged.
func (r *refusals) to() (metric.Int64Counter, *slog.Logger) {
	counter, logger := r.counter, r.logger
	if r.flows == nil || counter != nil && logger != silent.Logger {
		return counter, logger
	}
	if of := r.flows(); of != nil {
		if counter == nil {
			counter = of.counter
		}
		if logger == silent.Logger {
			logger = of.logger
		}
	}
	return counter, logger
}

func newRefusals(mp metric.MeterProvider, logger *slog.Logger, observers []Observer,
	attributes ...attribute.KeyValue) (*refusals, error) {
	r := &refusals{logger: logger, observers: observers, attributes: attributes}
	if mp == nil {
		return r, nil
	}
	var err error
	meter := mp.Meter(telemetry.Scope, metric.WithInstrumentationVersion(built))
	r.counter, err = meter.Int64Counter("pd.requests.refused",
		metric.WithUnit("{request}"), metric.WithDescription("Requests that no flow took: a wrong path, body or model"))
	return r, err
}

// tell counts, logs and shows a refusal by e. The model is no label, since clients can name what they like.
func (r *refusals) tell(ctx context.Context, refusal Refusal, e *Error) {
	if r == nil || e.Code == CodeClientGone {
		return
	}
	refusal.Err = e
	counter, logger := r.to()
	if counter != nil {
		counter.Add(ctx, 1, metric.WithAttributes(r.attributes...), metric.WithAttributes(
			attribute.String("error.type", codeLabel(e)), attribute.String("pd.api", refusal.API.String())))
	}
	level := slog.LevelInfo // the client's fault
	if e.HTTPStatus() >= 500 {
		level = slog.LevelWarn
	}
	if logger.Enabled(ctx, level) {
		logger.LogAttrs(ctx, level, "request refused", slog.String("request_id", refusal.RequestID),
			slog.String("api", refusal.API.String()), slog.Any("error", e))
	}
	for _, o := range r.observers {
		if o.Refused != nil {
			r.show(ctx, o, &refusal)
		}
	}
}

// show survives an observer that panics: the client gets its error all the same.
func (r *refusals) show(ctx context.Context, o Observer, refusal *Refusal) {
	defer func() {
		if cause := recover(); cause != nil {
			r.logger.ErrorContext(ctx, "an observer panicked", slog.String("request_id", refusal.RequestID),
				slog.Any("panic", cause))
		}
	}()
	o.Refused(ctx, refusal)
}

// refuse tells of a request that reached the flow, and that the flow cannot take.
func (f *Flow) refuse(ctx context.Context, c *call, err error) *Error {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		e = invalid(err)
	}
	f.handler.refusals.tell(ctx, Refusal{RequestID: c.id, API: c.req.API, Model: c.model()}, e)
	return e
}
