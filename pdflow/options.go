// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/modelname"
	"github.com/pdkit/pdkit/pdflow/responses"
)

// errorHandler writes an error to the client: see WithErrorHandler.
type errorHandler = func(w http.ResponseWriter, r *http.Request, e *Error)

type options struct {
	clientSide
	transport    http.RoundTripper
	timeouts     config.Timeouts
	retry        config.Retry
	fallback     config.Fallback
	fallbackFlow *Flow
	checkers     []connector.RequestChecker
	unsupported  config.Unsupported
	pickWait     time.Duration // how long a request waits for engines when none is ready
	observers    []Observer
	telemetry    Telemetry
	maxRescues   int // of one request
	keepAlive    time.Duration
	forward      []string
	adapters     func(model string) bool
	models       *modelname.Names // nil: clients name models as engines do
	engineUsage  bool             // the client gets the counts that D tells
	responses    *responses.Index // nil: nobody knows who has which
}

// clientSide are the options of a flow and of a Mux.
type clientSide struct {
	maxBody      int64
	budget       *Budget // nil: no bound
	errorHandler errorHandler
	requestID    func(*http.Request) string
}

// Option changes a flow or a Mux. Options may be given in any order; the last of a kind wins. [NewMux] says which it
// takes.
type Option interface{ apply(*options) error }

type optionFunc func(*options) error

func (f optionFunc) apply(o *options) error { return f(o) }

func (o *options) take(opts []Option) error {
	for _, option := range opts {
		if option == nil {
			return errors.New("pdflow: an option is nil")
		}
		if err := option.apply(o); err != nil {
			return fmt.Errorf("pdflow: %w", err)
		}
	}
	return nil
}

// WithTransport sends the legs through rt: a *transport.Transport, another round tripper, or a wrapper of one. It must
// not follow redirects, and its errors are asked for what was sent by transport.Classify. Default: a transport of the
// flow's own.
//
// Legs that run together go out once the connections of both stand, and a handoff's age is checked again once D's
// stands: see transport.BeforeSend. A round tripper that connects by neither a *transport.Transport nor net/http, and
// calls no net/http/httptrace hooks, shows only when it reads a leg's body. If it reads the body before it connects,
// one leg may go out although the other's engine cannot be reached. It must then carry both legs: one leg through it
// and the other through net/http would wait for each other in vain.
func WithTransport(rt http.RoundTripper) Option {
	return optionFunc(func(o *options) error {
		o.transport = rt
		return needs("WithTransport", rt != nil, "a RoundTripper")
	})
}

// WithTimeouts sets the limits of a request's phases. A limit of zero is that of an earlier WithTimeouts, else the
// connector's own default, else that of [config.Timeouts]; [config.None] is no limit. Connect and HealthCheck are not
// the flow's: see transport.Options and health.Options.
func WithTimeouts(t config.Timeouts) Option {
	return optionFunc(func(o *options) error {
		if err := t.Check(); err != nil {
			return fmt.Errorf("WithTimeouts: %w", err)
		}
		o.timeouts = t.Or(o.timeouts)
		return nil
	})
}

// WithRetry sets how often a request is tried at pairs. What is zero is the default.
func WithRetry(r config.Retry) Option {
	return optionFunc(func(o *options) error {
		if err := r.Check(); err != nil {
			return fmt.Errorf("WithRetry: %w", err)
		}
		o.retry = r
		return nil
	})
}

// WithFallback sets what happens to requests that no pair could serve. Default [config.FallbackError].
// [config.FallbackConnector] hands them to another flow, with another connector: give that flow, and to no other
// fallback any.
func WithFallback(f config.Fallback, other ...*Flow) Option {
	return optionFunc(func(o *options) error {
		o.fallback, o.fallbackFlow = f, nil
		switch f {
		case "", config.FallbackError, config.FallbackDecode:
			return needs("WithFallback", len(other) == 0, "config.FallbackConnector where it has a flow")
		case config.FallbackConnector:
			if len(other) == 1 {
				o.fallbackFlow = other[0]
			}
			return needs("WithFallback", o.fallbackFlow != nil, "one flow with config.FallbackConnector")
		}
		return needs("WithFallback", false, "one of config's fallbacks")
	})
}

// WithRequestCheckers refuses also what these refuse with a [connector.RequestError]; what else they find goes
// unheeded. It is for engines that flows of several connectors share: a request that would harm an engine for the sake
// of one of its connectors does so whichever flow sends it.
func WithRequestCheckers(checkers ...connector.RequestChecker) Option {
	return optionFunc(func(o *options) error {
		for _, c := range checkers {
			if c == nil {
				return errors.New("WithRequestCheckers needs checkers that are not nil")
			}
		}
		o.checkers = append(o.checkers, checkers...)
		return nil
	})
}

// WithUnsupported sets what happens to requests that two engines cannot carry. Default
// [config.UnsupportedAggregate].
func WithUnsupported(u config.Unsupported) Option {
	return optionFunc(func(o *options) error {
		if u != "" && u != config.UnsupportedAggregate && u != config.UnsupportedRefuse {
			return errors.New("WithUnsupported needs config.UnsupportedAggregate or config.UnsupportedRefuse")
		}
		o.unsupported = u
		return nil
	})
}

const defaultMaxBody = 32 << 20

// WithMaxBody limits the client's body, in bytes. Default 32 MiB.
func WithMaxBody(n int64) Option {
	return optionFunc(func(o *options) error {
		if n < 1 {
			return errors.New("WithMaxBody needs a limit of 1 byte or more")
		}
		o.maxBody = n
		return nil
	})
}

// WithErrorHandler has h write errors to clients. The flow has set X-Request-Id and, for an aggregated or fallen-back
// request, X-PD-Mode; nothing has been written. Default: [Error.Send]. For streams that [WithKeepAlive] has begun, w is
// not the client's.
func WithErrorHandler(h func(w http.ResponseWriter, r *http.Request, e *Error)) Option {
	return optionFunc(func(o *options) error {
		o.errorHandler = h
		return needs("WithErrorHandler", h != nil, "a function")
	})
}

// WithObserver adds an observer.
func WithObserver(x Observer) Option {
	return optionFunc(func(o *options) error { o.observers = append(o.observers, x); return nil })
}

// Telemetry says what a flow logs, measures and traces, with the SDK that the program brings.
type Telemetry struct {
	// Logger gets failed requests (warn), and for debugging served ones and clients that left. Nil: silence.
	Logger *slog.Logger

	// TracerProvider makes spans: pd.request with the children pd.prefill and pd.decode. Nil: none.
	TracerProvider trace.TracerProvider
	// Propagator is how a trace is continued from the client and to the engines. Nil: W3C trace context.
	Propagator propagation.TextMapPropagator
	// SpanName names spans. operation is request, prepare, encode, prefill, decode, cleanup or rescue. It must be safe
	// for concurrent use. Nil: "pd." and the operation, the same for all connectors, as OpenTelemetry wants names to be
	// few.
	SpanName func(connector, operation string) string

	// MeterProvider records metrics. Nil: none.
	MeterProvider metric.MeterProvider
	// Attributes are added to all metrics, for example the model where a program serves several. Their values should be
	// few: each makes a series of its own.
	Attributes []attribute.KeyValue
	// GenAI records requests a second time, by the names of OpenTelemetry's semantic conventions for generative AI:
	// gen_ai.server.request.duration, gen_ai.server.time_to_first_token, gen_ai.server.time_per_output_token and
	// gen_ai.client.inference.usage.… (see docs/metrics.md). It is gen_ai.provider.name, as "vllm". The model is a
	// label where Attributes has it. "": off.
	GenAI string
	// Usage asks decode engines for the token counts of streams whose client did not, for [Outcome.Usage], and takes
	// the chunk without choices that holds them out of the stream again. It applies to chats and completions: other
	// APIs' streams have the counts. Each event of such a stream is parsed.
	Usage bool
}

// silent is the telemetry of a flow or a Mux that has none.
var silent = Telemetry{Logger: slog.New(slog.DiscardHandler)}

// WithTelemetry logs, measures and traces. What is set in t is added to what an earlier WithTelemetry has set. Default:
// nothing.
func WithTelemetry(t Telemetry) Option {
	return optionFunc(func(o *options) error {
		own := &o.telemetry
		if t.Logger != nil {
			own.Logger = t.Logger
		}
		if t.TracerProvider != nil {
			own.TracerProvider = t.TracerProvider
		}
		if t.Propagator != nil {
			own.Propagator = t.Propagator
		}
		if t.SpanName != nil {
			own.SpanName = t.SpanName
		}
		if t.MeterProvider != nil {
			own.MeterProvider = t.MeterProvider
		}
		own.Attributes = append(own.Attributes, t.Attributes...)
		own.GenAI = cmp.Or(t.GenAI, own.GenAI)
		own.Usage = own.Usage || t.Usage
		return nil
	})
}

// needs is the error of an option without its value.
func needs(option string, ok bool, what string) error {
	if ok {
		return nil
	}
	return errors.New(option + " needs " + what)
}

// WithAdapters lets a [Mux] give the flow the requests for models that have no route of their own and that serves
// reports: LoRA adapters of the flow's model. Adapters of package pick follows those that engines list. serves must be
// quick, and safe for concurrent use. Of several flows that serve an adapter, the one whose model comes first in the
// alphabet gets its requests.
func WithAdapters(serves func(model string) bool) Option {
	return optionFunc(func(o *options) error {
		o.adapters = serves
		return needs("WithAdapters", serves != nil, "a function")
	})
}

// WithForwardHeaders adds client headers to those that legs carry. Cookies, hop-by-hop headers, Accept-Encoding, Expect
// and those that choose an engine's rank or transfer (X-Data-Parallel-Rank, X-Override-…) are refused.
func WithForwardHeaders(names ...string) Option {
	return optionFunc(func(o *options) error {
		for _, n := range names {
			c := http.CanonicalHeaderKey(n)
			if neverForwarded(c) {
				return fmt.Errorf("WithForwardHeaders: %s must not reach engines", c)
			}
			o.forward = append(o.forward, c)
		}
		return nil
	})
}

// WithEngineUsage leaves the usage of responses as decode engines write it. By default, where a decode engine counts
// what it took over as cached (connector.Serving.ReusedInUsage), the client gets prefill's count of cached tokens, of
// all client APIs, in whole responses and in streams: clients are billed by it. If prefill's response has no count, as
// from a vLLM without --enable-prompt-tokens-details, it is 0. A response that a host passes on by itself
// ([Step.Relay]) keeps the engine's counts.
func WithEngineUsage() Option {
	return optionFunc(func(o *options) error { o.engineUsage = true; return nil })
}
