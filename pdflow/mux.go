// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
)

// Server is what a [Mux] routes to: a [*Flow] or a [*Split].
type Server interface {
	// flowFor returns the flow that serves a request.
	flowFor(r *connector.Request, requestID string) *Flow
	// Ready returns nil if requests can be served now: see Flow.Ready.
	Ready(ctx context.Context) error
}

func (f *Flow) flowFor(*connector.Request, string) *Flow { return f }

// MuxOptions are a Mux's own settings, as a flow has them as options; nil and zero values mean the defaults.
type MuxOptions struct {
	MaxBody      int64                      // bytes; default 32 MiB
	Budget       *Budget                    // of all bodies; nil: no bound. The flows have their own: WithBudget
	BodyTimeout  time.Duration              // reading a client's body; default 60 s, config.None: none
	WriteTimeout time.Duration              // writing an error to a client; default 30 s, config.None: none
	ErrorHandler ErrorHandler               // default WriteError
	RequestID    func(*http.Request) string // see WithRequestID; default: the client's X-Request-Id

	// Where it is told of requests that no flow gets, as that their model is served nowhere: pd.requests.refused,
	// Observer.Refused, and a line in the log, at level info where it is the client's fault.
	MeterProvider metric.MeterProvider // default: none
	Logger        *slog.Logger         // default: none
	Observers     []Observer
}

// Mux serves several models behind one listener. A request goes to the flow of the model that it names. One that names
// no model goes to the only flow, or else to the flow for any model. Routes may be replaced while it serves.
type Mux struct {
	front  front
	routes atomic.Pointer[map[string]Server]
}

// NewMux makes a Mux without routes.
func NewMux(o *MuxOptions) *Mux {
	if o == nil {
		o = &MuxOptions{}
	}
	m := &Mux{}
	t := config.Timeouts{Body: o.BodyTimeout, Write: o.WriteTimeout}.Resolve(0)
	logger := cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	// The only error is that of a meter, which gives an instrument all the same.
	refusals, _ := newRefusals(o.MeterProvider, logger, o.Observers)
	m.front = front{refusals: refusals, maxBody: cmp.Or(max(o.MaxBody, 0), 32<<20), budget: o.Budget,
		onError: WriteError, requestID: o.RequestID,
		bodyTimeout: t.Body, writeTimeout: t.Write, find: m.find}
	if o.ErrorHandler != nil {
		m.front.onError = o.ErrorHandler
	}
	m.routes.Store(&map[string]Server{})
	return m
}

// SetRoutes replaces all routes: model name to flow or split. "" and "*" both stand for any model. Requests in flight
// go on. A flow may be shut down once its route is replaced: its successor serves the requests that reach it too late.
func (m *Mux) SetRoutes(routes map[string]Server) error {
	own := make(map[string]Server, len(routes))
	for model, s := range routes {
		if f, isFlow := s.(*Flow); s == nil || isFlow && f == nil {
			return errors.New("pdflow: SetRoutes: a model without a flow")
		}
		if model == "*" {
			model = ""
		}
		if _, twice := own[model]; twice {
			return errors.New(`pdflow: SetRoutes: "" and "*" are the same route`)
		}
		own[model] = s
	}
	m.routes.Store(&own)
	return nil
}

// Lookup returns what serves a model, by the rules of Mux.
func (m *Mux) Lookup(model string) (Server, bool) {
	routes := *m.routes.Load()
	if s, ok := routes[model]; ok {
		return s, true
	}
	if model == "" && len(routes) == 1 {
		for _, s := range routes {
			return s, true
		}
	}
	s, ok := routes[""]
	return s, ok
}

func (m *Mux) find(req *connector.Request, id string) (*Flow, *Error) {
	s, ok := m.Lookup(req.Model)
	if !ok {
		return nil, &Error{Code: CodeNotFound, Param: "model", Message: "no such model is served here"}
	}
	return s.flowFor(req, id), nil
}

// ServeHTTP serves the client APIs' paths by POST, and answers 404 to everything else.
func (m *Mux) ServeHTTP(w http.ResponseWriter, r *http.Request) { m.front.serve(w, r) }

// Middleware serves the client APIs' paths and hands everything else to next.
func (m *Mux) Middleware(next http.Handler) http.Handler { return m.front.middleware(next) }
