// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/pdkit/pdkit/connector"
)

// Timeouts bound the phases of a request. 0 means none.
type Timeouts struct {
	Prefill time.Duration // from sending prefill until its whole answer is read; default 60 s
	Handoff time.Duration // oldest handoff that decode may use, from P's last byte; default: the lease less 5 s (half of a lease under 10 s)
	Decode  time.Duration // from sending decode (together: from P's answer) until its first byte; default 600 s
	Idle    time.Duration // silence between two reads of an answer; default 60 s
	Cleanup time.Duration // a connector's cleaning up; default 5 s
	Write   time.Duration // one write to the client; default 30 s
	Body    time.Duration // reading the client's body; default 60 s
}

// DefaultTimeouts are the timeouts of a flow without [WithTimeouts]; Handoff is derived from the connector's lease.
func DefaultTimeouts() Timeouts {
	return Timeouts{Prefill: 60 * time.Second, Handoff: -1, Decode: 600 * time.Second, Idle: 60 * time.Second,
		Cleanup: 5 * time.Second, Write: 30 * time.Second, Body: 60 * time.Second}
}

// Retry bounds the attempts at pairs.
type Retry struct {
	MaxAttempts int           // the first included; default 2
	BackoffBase time.Duration // default 50 ms; doubled per attempt, with jitter
	BackoffMax  time.Duration // default 2 s
}

// Fallback is what happens when no pair could serve a request with KV transfer.
type Fallback uint8

// The fallbacks. A fallback to another connector is [WithFallbackFlow].
const (
	FallbackError  Fallback = iota // the client gets the error
	FallbackDecode                 // one decode engine serves the request alone; counted, and marked in X-PD-Mode
)

// Unsupported is what happens to requests that two engines cannot carry.
type Unsupported uint8

// The policies.
const (
	UnsupportedAggregate Unsupported = iota // one engine serves them
	UnsupportedRefuse                       // 400, naming the member
)

// ErrorHandler writes an error to the client. The flow has set X-Request-Id and, for an aggregated or fallen-back
// request, X-PD-Mode; nothing has been written.
type ErrorHandler func(w http.ResponseWriter, r *http.Request, e *Error)

type options struct {
	transport      http.RoundTripper
	timeouts       Timeouts
	retry          Retry
	fallback       Fallback
	fallbackFlow   *Flow
	checkers       []connector.RequestChecker
	unsupported    Unsupported
	maxBody        int64
	pickWait       time.Duration
	errorHandler   ErrorHandler
	logger         *slog.Logger
	observers      observers
	tracerProvider trace.TracerProvider
	meterProvider  metric.MeterProvider
	propagator     propagation.TextMapPropagator
	forward        []string
}

// Option changes a flow. Options may be given in any order; the last of a kind wins.
type Option interface{ apply(*options) error }

type optionFunc func(*options) error

func (f optionFunc) apply(o *options) error { return f(o) }

// WithTransport sends the legs through rt, which should be a *transport.Transport or wrap one: it must not follow redirects,
// and its errors are asked for what was sent by transport.Classify. Default: a transport of the flow's own.
func WithTransport(rt http.RoundTripper) Option {
	return optionFunc(func(o *options) error {
		if rt == nil {
			return errors.New("WithTransport needs a RoundTripper")
		}
		o.transport = rt
		return nil
	})
}

// WithTimeouts replaces the timeouts. Start from [DefaultTimeouts]; a negative Handoff is derived from the connector's lease.
func WithTimeouts(t Timeouts) Option {
	return optionFunc(func(o *options) error {
		for _, d := range []time.Duration{t.Prefill, t.Decode, t.Idle, t.Cleanup, t.Write, t.Body} {
			if d < 0 {
				return errors.New("WithTimeouts: a timeout is negative; 0 means none")
			}
		}
		o.timeouts = t
		return nil
	})
}

// WithRetry replaces the bounds of attempts.
func WithRetry(r Retry) Option {
	return optionFunc(func(o *options) error {
		if r.MaxAttempts < 1 || r.BackoffBase < 0 || r.BackoffMax < 0 {
			return fmt.Errorf("WithRetry: MaxAttempts must be 1 or more and backoffs not negative")
		}
		o.retry = r
		return nil
	})
}

// WithFallback sets what happens when no pair could serve. Default [FallbackError].
func WithFallback(f Fallback) Option {
	return optionFunc(func(o *options) error { o.fallback = f; return nil })
}

// WithFallbackFlow hands requests that no pair could serve to another flow, with another connector.
func WithFallbackFlow(f *Flow) Option {
	return optionFunc(func(o *options) error { o.fallbackFlow = f; return nil })
}

// WithRequestCheckers refuses also what these refuse with a [connector.RequestError]; what else they find goes unheeded. It is for engines
// that flows of several connectors share: a request that would harm an engine for the sake of one of its connectors does so whichever flow
// sends it.
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

// WithUnsupported sets what happens to requests that two engines cannot carry. Default [UnsupportedAggregate].
func WithUnsupported(u Unsupported) Option {
	return optionFunc(func(o *options) error { o.unsupported = u; return nil })
}

// WithMaxBody limits the client's body, in bytes. Default 32 MiB. A [Mux] has a limit of its own.
func WithMaxBody(n int64) Option {
	return optionFunc(func(o *options) error {
		if n < 1 {
			return errors.New("WithMaxBody needs a limit of 1 byte or more")
		}
		o.maxBody = n
		return nil
	})
}

// WithPickWait bounds the wait for engines when none is ready. Default 250 ms; 0: no wait.
func WithPickWait(d time.Duration) Option {
	return optionFunc(func(o *options) error { o.pickWait = d; return nil })
}

// WithErrorHandler replaces the writer of errors. Default [WriteError].
func WithErrorHandler(h ErrorHandler) Option {
	return optionFunc(func(o *options) error { o.errorHandler = h; return nil })
}

// WithLogger logs failed requests (warn), and for debugging served ones and clients that left. Default: silence.
func WithLogger(l *slog.Logger) Option {
	return optionFunc(func(o *options) error { o.logger = l; return nil })
}

// WithObserver adds an observer.
func WithObserver(x Observer) Option {
	return optionFunc(func(o *options) error {
		if !o.observers.add(x) {
			return fmt.Errorf("WithObserver: %T is neither a SessionObserver nor a LegObserver", x)
		}
		return nil
	})
}

// WithTracerProvider makes spans with tp: pd.request with the children pd.prefill and pd.decode. Default: no spans.
func WithTracerProvider(tp trace.TracerProvider) Option {
	return optionFunc(func(o *options) error { o.tracerProvider = tp; return nil })
}

// WithMeterProvider records metrics with mp. Default: none.
func WithMeterProvider(mp metric.MeterProvider) Option {
	return optionFunc(func(o *options) error { o.meterProvider = mp; return nil })
}

// WithPropagator replaces how a trace is continued from the client and to the engines. Default: W3C trace context.
func WithPropagator(p propagation.TextMapPropagator) Option {
	return optionFunc(func(o *options) error { o.propagator = p; return nil })
}

// WithForwardHeaders adds client headers to those that legs carry. Cookies, hop-by-hop headers, Accept-Encoding and
// Expect are refused.
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
